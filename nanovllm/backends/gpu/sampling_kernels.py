"""Sampling in Triton: one token per row of logits, greedy or drawn, and its log-probability. Two launches for all rows.

    reduce_chunks   program (r, i)   row r: the peak and the sums of 16 chunks of 128 logits each
    sample_row      program r        row r: combines its chunks, and chooses the token

One program can't read a row of 150,000 logits quickly, so many programs read a part each, like the splits of a context
in attention. After that, sample_row reads little. A greedy row needs only the chunk of its peak. Other rows draw by a
race: each token's weight is divided by random noise, and the largest result wins (see ../torch/sampler.py). The chunks
race first, so a row that draws from all tokens needs only the winning chunk. Only rows with top_k, top_p or min_p read
more, and only the chunks whose peaks are high enough.

Nothing is sorted. A token's sort key is one integer: the bits of its logit, then its inverted id, so that the lower id
wins a tie. No two tokens share a key. Each parameter keeps the tokens at or above a certain key:

    min_p    the key of the lowest logit that is probable enough
    top_k    the k-th largest key, found digit by digit: count the tokens with each value of the top 8 bits, pick the
             value that has the k-th token, continue with the next 8 bits of those tokens
    top_p    like the plain sampler, draw first and check afterwards: if the likelier tokens already reach top_p
             without the drawn token, reject it, and draw again from those likelier tokens

The noise is the same as in the plain sampler, and so are the tokens, unless two scores tie within rounding errors.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..torch.sampler import CHUNK, RowParams
from .early_start import EARLY_START_OPTIONS, start_next_and_wait
from .tiles import CHUNKS_PER_PROGRAM, SamplingWorkspace

MAX_VOCAB_SIZE = 1 << 24  # smaller token ids fit into a float32, and into the low bits of a sort key


def sample_rows(logits: Tensor, params: RowParams, workspace: SamplingWorkspace, tokens: Tensor, out: Tensor) -> None:
    """Launch both kernels for plain.sample_rows(), which documents arguments and shapes."""
    rows, vocab_size = logits.shape
    num_chunks = workspace.peaks.shape[1]
    assert logits.stride(1) == 1 and vocab_size < MAX_VOCAB_SIZE, (logits.stride(), vocab_size)
    assert num_chunks == triton.cdiv(vocab_size, CHUNK) and rows <= len(workspace.peaks), (num_chunks, rows)
    assert tokens.shape == (rows,) and tokens.is_contiguous() and out.is_contiguous() and out.shape == (rows, 2)
    assert all(each.shape == (rows, 1) and each.is_contiguous() for each in params), [each.shape for each in params]
    sizes = {"VOCAB_SIZE": vocab_size, "NUM_CHUNKS": num_chunks, "CHUNK": CHUNK, "CHUNKS": CHUNKS_PER_PROGRAM}
    reduce_chunks[(rows, triton.cdiv(num_chunks, CHUNKS_PER_PROGRAM))](
        logits, params.temperature, workspace.peaks, workspace.totals, workspace.weights, logits.stride(0), **sizes,
        num_warps=4, **EARLY_START_OPTIONS,
    )  # fmt: skip
    sample_row[(rows,)](
        logits, *params, workspace.peaks, workspace.totals, workspace.weights, workspace.chunks, tokens, out,
        logits.stride(0), **sizes, WIDTH=triton.next_power_of_2(num_chunks), num_warps=8, **EARLY_START_OPTIONS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["temperature"])  # row_stride stays specialized: a multiple of 16 allows wide loads
def reduce_chunks(
    logits,  # [rows, vocab_size]
    temperature,  # float32 [rows]
    peaks,  # float32 [rows, NUM_CHUNKS]
    totals,  # float32 [rows, NUM_CHUNKS]
    weights,  # float32 [rows, NUM_CHUNKS]
    row_stride,  # from one row of logits to the next
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,  # per program
):
    """Reduce chunks of one row to peaks, and to sums of exp(logit - peak). Only `weights` include the temperature."""
    start_next_and_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)  # [CHUNKS]
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]  # [CHUNKS, CHUNK]
    values = tl.load(logits + row * row_stride + token, mask=token < VOCAB_SIZE, other=float("-inf")).to(tl.float32)
    peak = tl.max(values, 1)  # [CHUNKS]
    # A NaN anywhere, or a peak of +inf, makes the sum NaN.
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp(values - shift[:, None]), 1)
    weight = total
    t = tl.load(temperature + row)
    if t > 0.0 and t != 1.0:
        weight = tl.sum(tl.exp(tl.div_rn(values, t) - tl.div_rn(shift, t)[:, None]), 1)
    offsets, is_chunk = row * NUM_CHUNKS + chunk, chunk < NUM_CHUNKS
    tl.store(peaks + offsets, peak, mask=is_chunk)
    tl.store(totals + offsets, total, mask=is_chunk)
    tl.store(weights + offsets, weight, mask=is_chunk)


@triton.jit
def logit_key(values):
    """Return uint32 keys that sort as these float32 values do. The bits of negative floats must be inverted."""
    bits = (values + 0.0).to(tl.uint32, bitcast=True)  # -0.0 becomes 0.0
    return bits ^ tl.where(bits >= 0x80000000, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def token_key(values, token):
    """Return the sort keys of tokens: uint64, larger is likelier. values float32, the logits of `token`."""
    return (logit_key(values).to(tl.uint64) << 24) + (0xFFFFFF - token).to(tl.uint64)


@triton.jit
def exponential_noise(key, place):
    """Return Exp(1) noise, float32, the same as torch/sampler.exponential_noise(), which cites the source.

    key uint64, of the row; place int, any shape, the index of each noise value
    """
    z = key + (place + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    uniform = ((z >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2 ** -52
    return (-tl.log(1.0 - uniform)).to(tl.float32)  # the difference is exact


@triton.jit
def load_chunks(logits, chunks, start, num_listed, VOCAB_SIZE: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Return the logits of CHUNKS listed chunks, -inf past the end, and their token ids, both [CHUNKS, CHUNK]."""
    i = start + tl.arange(0, CHUNKS)
    chunk = tl.load(chunks + i, mask=i < num_listed, other=0)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    is_token = (i < num_listed)[:, None] & (token < VOCAB_SIZE)
    return tl.load(logits + token, mask=is_token, other=float("-inf")).to(tl.float32), token


@triton.jit
def list_chunks(peak_keys, min_key, chunks, is_chunk, WIDTH: tl.constexpr):
    """Write the indices of the chunks whose peaks reach `min_key` to `chunks`, and return how many there are."""
    is_listed = is_chunk & (peak_keys >= (min_key >> 24).to(tl.uint32))  # [WIDTH]
    index = tl.cumsum(is_listed.to(tl.int32), 0) - 1
    tl.store(chunks + index, tl.arange(0, WIDTH), mask=is_listed)
    tl.debug_barrier()  # other threads of the program read the list
    return tl.sum(is_listed.to(tl.int32), 0)


@triton.jit
def kth_peak(peak_keys, k):
    """Return the k-th largest key, rounded down to its top 16 bits: at least k keys reach it, and rarely many more."""
    result = tl.full([], 0, tl.uint32)
    for i in range(16):
        candidate = result + (tl.full([], 0x80000000, tl.uint32) >> i)
        result = tl.where(tl.sum((peak_keys >= candidate).to(tl.int32), 0) >= k, candidate, result)
    return result


@triton.jit
def kth_token(
    logits, chunks, num_listed, min_key, k, VOCAB_SIZE: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Return a sort key that exactly k listed tokens reach, or `min_key` if no more than k listed tokens reach that."""
    digits = tl.arange(0, 256)
    prefix, shift = tl.full([], 0, tl.uint64), tl.full([], 48, tl.int32)
    num_matching = tl.full([], 1 << 30, tl.int32)  # tokens whose keys begin with prefix
    while (shift >= 0) & (num_matching > k):
        counts = tl.zeros([256], tl.int32)
        for start in range(0, num_listed, CHUNKS):
            values, token = load_chunks(logits, chunks, start, num_listed, VOCAB_SIZE, CHUNK, CHUNKS)
            keys = token_key(values, token)
            is_matching = (values > float("-inf")) & (keys >= min_key) & (keys >> (shift + 8) == prefix)
            digit = ((keys >> shift) & 255).to(tl.int32)
            counts += tl.histogram(tl.reshape(digit, [CHUNKS * CHUNK]), 256, tl.reshape(is_matching, [CHUNKS * CHUNK]))
        reached = tl.cumsum(counts, 0, reverse=True)  # [256], tokens with this digit or a larger one
        is_digit = (reached >= k) & (reached - counts < k)
        k -= tl.sum(tl.where(is_digit, reached - counts, 0), 0)
        num_matching = tl.sum(tl.where(is_digit, counts, 0), 0)  # 0 if there are fewer than k
        prefix = (prefix << 8) + tl.sum(tl.where(is_digit, digits, 0), 0).to(tl.uint64)
        shift -= 8
    return tl.maximum(min_key, prefix << (shift + 8).to(tl.uint64))


@triton.jit
def race_in_chunk(logits, chunk, min_key, t, peak, key, num_used, VOCAB_SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Let the tokens of one chunk whose sort keys reach `min_key` race, and return the winner's id."""
    i = tl.arange(0, CHUNK)
    token = chunk * CHUNK + i
    values = tl.load(logits + token, mask=token < VOCAB_SIZE, other=float("-inf")).to(tl.float32)
    weights = tl.where(token_key(values, token) >= min_key, tl.exp(tl.div_rn(values, t) - tl.div_rn(peak, t)), 0.0)
    scores = weights / exponential_noise(key, num_used + i)
    return tl.min(tl.where(scores == tl.max(scores, 0), token, VOCAB_SIZE - 1), 0)


@triton.jit
def race(
    logits, chunks, num_listed, min_key, t, peak, key, has_top_k, num_used,
    VOCAB_SIZE: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Let the listed tokens whose sort keys reach `min_key` race. Return the winner, and the sum of their weights.

    With top_k, tokens race with noise that depends on their ids. Otherwise chunks race with the sums of their weights,
    and then the tokens of the winning chunk.
    """
    best, winner, total = tl.full([], -1.0, tl.float32), tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float32)
    for start in range(0, num_listed, CHUNKS):
        values, token = load_chunks(logits, chunks, start, num_listed, VOCAB_SIZE, CHUNK, CHUNKS)
        weights = tl.where(token_key(values, token) >= min_key, tl.exp(tl.div_rn(values, t) - tl.div_rn(peak, t)), 0.0)
        sums = tl.sum(weights, 1)  # [CHUNKS]
        total += tl.sum(sums, 0)
        if has_top_k:
            scores = weights / exponential_noise(key, token)  # [CHUNKS, CHUNK]
            score = tl.max(tl.max(scores, 1), 0)
            leader = tl.min(tl.min(tl.where(scores == score, token, VOCAB_SIZE - 1), 1), 0)
        else:
            chunk = tl.min(token, 1) // CHUNK  # [CHUNKS]
            chunk_scores = sums / exponential_noise(key, num_used + chunk)
            score = tl.max(chunk_scores, 0)
            leader = tl.min(tl.where(chunk_scores == score, chunk, VOCAB_SIZE // CHUNK), 0)
        winner = tl.where(score > best, leader, winner)
        best = tl.maximum(best, score)
    if not has_top_k:
        place = num_used + tl.cdiv(VOCAB_SIZE, CHUNK)
        winner = race_in_chunk(logits, winner, min_key, t, peak, key, place, VOCAB_SIZE, CHUNK)
    return winner, total


@triton.jit(do_not_specialize=["temperature", "top_k", "top_p", "min_p_gap", "key", "chunks", "tokens", "out"])
def sample_row(
    logits,  # [rows, vocab_size]
    temperature,  # float32 [rows]
    top_k,  # int64 [rows]
    top_p,  # float32 [rows]
    min_p_gap,  # float32 [rows]
    key,  # int64 [rows]
    peaks,  # float32 [rows, NUM_CHUNKS]
    totals,  # float32 [rows, NUM_CHUNKS]
    weights,  # float32 [rows, NUM_CHUNKS]
    chunks,  # int32 [rows, NUM_CHUNKS], memory for lists of chunks
    tokens,  # int64 [rows], output
    out,  # float32 [rows, 2], output
    row_stride,  # from one row of logits to the next
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,  # listed chunks at a time
    WIDTH: tl.constexpr,  # NUM_CHUNKS, padded
):
    """Choose one row's token."""
    start_next_and_wait()
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    is_chunk, offsets = i < NUM_CHUNKS, row * NUM_CHUNKS + i
    chunk_peaks = tl.load(peaks + offsets, mask=is_chunk, other=float("-inf"))  # [WIDTH]
    peak = tl.max(chunk_peaks, 0)
    shares = tl.exp(chunk_peaks - tl.where(peak == float("-inf"), 0.0, peak))  # 0 for a chunk that is all -inf
    total = tl.sum(tl.load(totals + offsets, mask=is_chunk, other=0.0) * shares, 0)
    lse = peak + tl.log(total)  # -inf if all logits are
    logits += row * row_stride
    t = tl.load(temperature + row)
    if t == 0.0:
        token = tl.min(tl.where(chunk_peaks == peak, i, NUM_CHUNKS - 1), 0) * CHUNK + tl.arange(0, CHUNK)
        values = tl.load(logits + token, mask=token < VOCAB_SIZE, other=float("-inf")).to(tl.float32)
        winner = tl.min(tl.where(values == peak, token, VOCAB_SIZE - 1), 0)
    else:
        k = tl.minimum(tl.load(top_k + row), VOCAB_SIZE).to(tl.int32)
        p, gap = tl.load(top_p + row), tl.load(min_p_gap + row)
        noise_key = tl.load(key + row).to(tl.uint64, bitcast=True)
        chunks += row * NUM_CHUNKS
        peak_keys = logit_key(chunk_peaks)
        has_top_k = (k > 0) & (k < VOCAB_SIZE)
        min_key = tl.full([], 0, tl.uint64)
        num_used = tl.full([], 0, tl.int32)  # noise values that earlier draws have used
        if has_top_k | (gap > float("-inf")):
            min_key = logit_key(peak + gap).to(tl.uint64) << 24
            if has_top_k:
                min_key = tl.maximum(min_key, kth_peak(peak_keys, k).to(tl.uint64) << 24)
            num_listed = list_chunks(peak_keys, min_key, chunks, is_chunk, WIDTH)
            if has_top_k:
                min_key = kth_token(logits, chunks, num_listed, min_key, k, VOCAB_SIZE, CHUNK, CHUNKS)
            winner, total = race(
                logits, chunks, num_listed, min_key, t, peak, noise_key, has_top_k, num_used, VOCAB_SIZE, CHUNK, CHUNKS
            )
        else:
            shares = tl.exp(tl.div_rn(chunk_peaks, t) - tl.div_rn(peak, t))
            sums = tl.load(weights + offsets, mask=is_chunk, other=0.0) * shares  # [WIDTH]
            total = tl.sum(sums, 0)
            scores = sums / exponential_noise(noise_key, i)
            chunk = tl.min(tl.where(scores == tl.max(scores, 0), i, NUM_CHUNKS - 1), 0)
            winner = race_in_chunk(logits, chunk, min_key, t, peak, noise_key, NUM_CHUNKS, VOCAB_SIZE, CHUNK)
        draws_again = p < float("inf")
        while draws_again:
            num_used += NUM_CHUNKS + CHUNK
            min_key = token_key(tl.load(logits + winner).to(tl.float32), winner) + 1
            num_listed = list_chunks(peak_keys, min_key, chunks, is_chunk, WIDTH)
            candidate, likelier_total = race(
                logits, chunks, num_listed, min_key, t, peak, noise_key, has_top_k, num_used, VOCAB_SIZE, CHUNK, CHUNKS
            )
            draws_again = (likelier_total >= p * total) & (likelier_total > 0.0)
            winner = tl.where(draws_again, candidate, winner)
    logit = tl.load(logits + winner).to(tl.float32)
    tl.store(tokens + row, winner.to(tl.int64))
    tl.store(out + row * 2, winner.to(tl.float32))
    tl.store(out + row * 2 + 1, logit - lse)  # NaN if lse is infinite
