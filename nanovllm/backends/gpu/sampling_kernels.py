"""A sampling kernel in Triton: each row's most likely token, its log-probability, and log(sum(exp(logits))).

    find_peak    program (r, p)   piece p of row r: its peak, the peak's token, the sum of exp(logit - peak)
    join_peaks   program r        row r: the same over all of its pieces, and the results

One program can't read a row of 150,000 logits quickly, so many read its pieces, like the splits of a context in
attention. torch's own operations would convert all logits to float32 first, and go over them again for each result.
"""

import triton
import triton.language as tl
from torch import Tensor

from .ops import LOGITS_PER_PROGRAM, LikeliestWorkspace

MAX_VOCAB_SIZE = 1 << 24  # a float32 holds every smaller token id


def find_likeliest(logits: Tensor, workspace: LikeliestWorkspace, out: Tensor) -> None:
    """Launch both kernels for plain.find_likeliest(), which documents arguments and shapes."""
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and vocab_size < MAX_VOCAB_SIZE, (logits.stride(), vocab_size)
    assert out.is_contiguous() and out.shape == (rows, 3) and rows <= len(workspace.peaks), (out.shape, rows)
    num_pieces = workspace.peaks.shape[1]
    find_peak[(rows, num_pieces)](
        logits, workspace.peaks, workspace.tokens, workspace.totals, logits.stride(0), VOCAB_SIZE=vocab_size,
        PIECE=LOGITS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
    join_peaks[(rows,)](
        workspace.peaks, workspace.tokens, workspace.totals, out, NUM_PIECES=num_pieces,
        WIDTH=triton.next_power_of_2(num_pieces), num_warps=1,
    )  # fmt: skip


@triton.jit  # row_stride stays specialized: when 16 divides it, a load takes 16 bytes
def find_peak(
    logits,  # [rows, vocab_size]
    peaks,  # float32 [rows, num_pieces]
    tokens,  # int32 [rows, num_pieces]
    totals,  # float32 [rows, num_pieces]
    row_stride,  # from one row of logits to the next
    VOCAB_SIZE: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Reduce one piece of one row."""
    row, piece = tl.program_id(0), tl.program_id(1)
    token = piece * PIECE + tl.arange(0, PIECE)  # [PIECE]
    is_token = token < VOCAB_SIZE
    numbers = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=is_token, other=float("-inf")).to(tl.float32)
    peak = tl.max(numbers, 0)
    out = row * tl.num_programs(1) + piece
    tl.store(peaks + out, peak)
    tl.store(tokens + out, tl.min(tl.where(numbers == peak, token, VOCAB_SIZE - 1), 0))
    # A NaN anywhere, or an infinite peak, makes the sum NaN.
    tl.store(totals + out, tl.sum(tl.exp(numbers - tl.where(peak == float("-inf"), 0.0, peak)), 0))


@triton.jit
def join_peaks(
    peaks,  # float32 [rows, NUM_PIECES]
    tokens,  # int32 [rows, NUM_PIECES]
    totals,  # float32 [rows, NUM_PIECES]
    out,  # float32 [rows, 3]
    NUM_PIECES: tl.constexpr,
    WIDTH: tl.constexpr,  # NUM_PIECES, padded
):
    """Combine the pieces of one row."""
    row, i = tl.program_id(0), tl.arange(0, WIDTH)
    is_piece = i < NUM_PIECES
    all_peaks = tl.load(peaks + row * NUM_PIECES + i, mask=is_piece, other=float("-inf"))  # [WIDTH]
    peak = tl.max(all_peaks, 0)
    candidates = tl.load(tokens + row * NUM_PIECES + i, mask=is_piece, other=0)
    token = tl.min(tl.where(is_piece & (all_peaks == peak), candidates, 2147483647), 0)
    shares = tl.exp(all_peaks - tl.where(peak == float("-inf"), 0.0, peak))  # 0 for a piece that is all -inf
    total = tl.sum(tl.load(totals + row * NUM_PIECES + i, mask=is_piece, other=0.0) * shares, 0)
    lse = peak + tl.log(total)  # -inf if the whole row is
    tl.store(out + row * 3, token.to(tl.float32))
    tl.store(out + row * 3 + 1, peak - lse)  # NaN if lse is infinite
    tl.store(out + row * 3 + 2, lse)
