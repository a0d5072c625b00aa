"""The likeliest token of each row of logits, its log-probability, and the logarithm of the sum of exponentials.

    program (r, p)    piece p of row r: its peak, where the peak is, the sum of exp(logit - peak)
    program r         row r: the same of all its pieces, and what is told of it

A row of 150,000 logits is too much for one program: the others would wait while it reads. So its pieces are read by
many, as the splits of a context are. torch's own operations turn all logits into float32 first, and go over them again
for each step of it.
"""

import triton
import triton.language as tl
from torch import Tensor

from .split import PIECE, LikeliestRoom

MAX_VOCAB = 1 << 24  # a float32 holds every smaller token id


def find_likeliest(logits: Tensor, room: LikeliestRoom, told: Tensor) -> None:
    """logits [rows, vocab_size] -> told float32 [rows, 3]: token id, its log-probability, log(sum(exp(logits)))

    Of equals the first. A row with NaN, infinity or nothing but -inf in it has a log-probability that is NaN.
    """
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and vocab_size < MAX_VOCAB, (logits.stride(), vocab_size)
    assert told.is_contiguous() and told.shape == (rows, 3) and rows <= len(room.peaks), (told.shape, rows)
    num_pieces = room.peaks.shape[1]
    find_peak[(rows, num_pieces)](
        logits, room.peaks, room.places, room.totals, logits.stride(0), VOCAB_SIZE=vocab_size, PIECE=PIECE, num_warps=4
    )
    join_peaks[(rows,)](
        room.peaks, room.places, room.totals, told, NUM_PIECES=num_pieces, WIDTH=triton.next_power_of_2(num_pieces),
        num_warps=1,
    )  # fmt: skip


@triton.jit  # where 16 divides row_stride, a load is of 16 bytes
def find_peak(
    logits,  # [rows, vocab_size]
    peaks,  # float32 [rows, num_pieces]
    places,  # int32 [rows, num_pieces]
    totals,  # float32 [rows, num_pieces]
    row_stride,  # from a row of logits to the next
    VOCAB_SIZE: tl.constexpr,
    PIECE: tl.constexpr,
):
    """One piece of one row."""
    row, piece = tl.program_id(0), tl.program_id(1)
    token = piece * PIECE + tl.arange(0, PIECE)  # [PIECE]
    is_token = token < VOCAB_SIZE
    numbers = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=is_token, other=float("-inf")).to(tl.float32)
    peak = tl.max(numbers, 0)
    out = row * tl.num_programs(1) + piece
    tl.store(peaks + out, peak)
    tl.store(places + out, tl.min(tl.where(numbers == peak, token, VOCAB_SIZE - 1), 0))
    # NaN beside a peak, or a peak of infinity, makes the sum NaN
    tl.store(totals + out, tl.sum(tl.exp(numbers - tl.where(peak == float("-inf"), 0.0, peak)), 0))


@triton.jit
def join_peaks(
    peaks,  # float32 [rows, NUM_PIECES]
    places,  # int32 [rows, NUM_PIECES]
    totals,  # float32 [rows, NUM_PIECES]
    told,  # float32 [rows, 3]
    NUM_PIECES: tl.constexpr,
    WIDTH: tl.constexpr,  # NUM_PIECES, padded
):
    """One row."""
    row, i = tl.program_id(0), tl.arange(0, WIDTH)
    is_piece = i < NUM_PIECES
    all_peaks = tl.load(peaks + row * NUM_PIECES + i, mask=is_piece, other=float("-inf"))  # [WIDTH]
    peak = tl.max(all_peaks, 0)
    place = tl.load(places + row * NUM_PIECES + i, mask=is_piece, other=0)
    token = tl.min(tl.where(is_piece & (all_peaks == peak), place, 2147483647), 0)
    shares = tl.exp(all_peaks - tl.where(peak == float("-inf"), 0.0, peak))  # 0 for a piece of nothing but -inf
    total = tl.sum(tl.load(totals + row * NUM_PIECES + i, mask=is_piece, other=0.0) * shares, 0)
    lse = peak + tl.log(total)  # of nothing but -inf: -inf
    tl.store(told + row * 3, token.to(tl.float32))
    tl.store(told + row * 3 + 1, peak - lse)  # NaN, if lse is infinite
    tl.store(told + row * 3 + 2, lse)
