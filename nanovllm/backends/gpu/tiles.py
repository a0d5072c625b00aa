"""How kernels divide their work among programs, and the memory for partial results.

Everything here is plain Python that runs on the host: no launch has to wait for a number from the device.
"""

import math
from typing import NamedTuple

import torch

from ..torch.sampler import CHUNK

MAX_SPLITS = 128
NEARLY_FULL = 0.85  # as a share of a wave of programs
PROGRAMS_PER_SM = 2  # one reads memory while the other computes
CHUNKS_PER_PROGRAM = 16  # of the sampler's chunks, each of 128 logits
ROW_TILES = 1, 16, 32, 64  # rows of x that gemm() multiplies at a time
HEIGHTS = 64, 32, 16  # rows of the weight that a program of gemm() takes
MIN_PROGRAMS = 64  # of gemm(): fewer can't request memory as fast as an H100 can deliver it
PREFILL_ROWS = 64, 128  # choices, per program; a query takes a row for each query head that shares a KV head


class DecodeWorkspace:
    """Memory for the partial results of paged_decode(), one for each split of a context."""

    def __init__(
        self, max_rows: int, num_heads: int, head_dim: int, num_splits: int, device: torch.device | str
    ) -> None:
        self.num_splits = num_splits
        rows = max_rows if num_splits > 1 else 0  # the result of a single split is final
        self.parts = torch.empty(rows, num_heads, num_splits, head_dim, dtype=torch.float32, device=device)
        self.lses = torch.empty(max_rows, num_heads, num_splits, dtype=torch.float32, device=device)  # log2(sum(exp2))


class SamplingWorkspace:
    """Memory for the partial results of sample_rows(). All tensors are [max_rows, num_chunks]."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device | str) -> None:
        shape = max_rows, -(-vocab_size // CHUNK)
        # Four tensors rather than parts of one: each starts at a multiple of 16 bytes, so the kernel compiles once.
        self.peaks = torch.empty(shape, dtype=torch.float32, device=device)
        self.totals = torch.empty(shape, dtype=torch.float32, device=device)
        self.weights = torch.empty(shape, dtype=torch.float32, device=device)
        self.chunks = torch.empty(shape, dtype=torch.int32, device=device)


def choose_splits(rows: int, num_kv_heads: int, num_sms: int) -> int:
    """Return how many splits keep every multiprocessor busy: always the same for a batch size, so graphs can record it.

    Programs run in waves. If the most splits that fit into one wave nearly fill it, return their number. Otherwise more
    waves may fill the GPU better: 20 rows of 8 KV heads fill 0.6 of one wave, but with 3 splits each, 1.8 of two waves.
    As in FlashAttention, return the fewest splits that fill their waves nearly as well as the best number of splits.

    >>> choose_splits(1, 8, 132), choose_splits(8, 8, 132), choose_splits(20, 8, 132), choose_splits(256, 8, 132)
    (33, 4, 3, 1)
    """
    waves = max(1, rows * num_kv_heads) / (PROGRAMS_PER_SM * num_sms)
    fitting = max(1, min(MAX_SPLITS, int(1 / waves)))
    if fitting == MAX_SPLITS or fitting * waves >= NEARLY_FULL:
        return fitting
    shares = [splits * waves / math.ceil(splits * waves) for splits in range(1, MAX_SPLITS + 1)]
    return next(splits for splits, share in enumerate(shares, 1) if share >= NEARLY_FULL * max(shares))


def row_tile(rows: int) -> int | None:
    """Return the rows that gemm() multiplies at a time if x has `rows` rows, or None if it takes several tiles.

    >>> row_tile(1), row_tile(5), row_tile(64), row_tile(65)
    (1, 16, 64, None)
    """
    return next((tile for tile in ROW_TILES if rows <= tile), None)


def choose_height(outputs: int, tile: int, has_tiles: bool) -> int:
    """Return the height of gemm()'s programs, each of which reads its rows of the weight, and all of x.

    It is at most `tile`, the rows of x: then reading x costs no more than reading the weight. Few outputs need lower
    programs, to keep the GPU busy. If there are several tiles of rows, there are enough programs.

    >>> choose_height(11264, 16, False), choose_height(11264, 64, False), choose_height(2048, 64, False)
    (16, 64, 32)
    """
    return max((h for h in HEIGHTS if h <= tile and (has_tiles or outputs >= MIN_PROGRAMS * h)), default=HEIGHTS[-1])


class Pace(NamedTuple):
    """The tiles in which a program reads a context, and the stages that load them ahead.

    Triton's pipeline loads later tiles while it computes one. Keys can load only after their block table entries, so a
    tile takes two stages before the stage that computes it. With five stages, two tiles are in flight. With three or
    four, prefill waits for each tile right after requesting it.
    """

    tile: int  # keys at a time
    num_stages: int


def paces(width: int, itemsize: int) -> list[Pace]:
    """Return the paces at which a program may read heads of `width` numbers, the fastest first.

    An H100 has 227 KiB of shared memory for a program, an RTX 4090 has 99, and a T4 has 64. So a tile of keys fills at
    most 16 KiB, and if that is too much, smaller ones keep as many in flight. Tiles have 16 to 128 keys.

    >>> paces(128, 2)[:4]
    [Pace(tile=64, num_stages=5), Pace(tile=32, num_stages=5), Pace(tile=16, num_stages=5), Pace(tile=16, num_stages=3)]
    >>> paces(16, 4)[0].tile, paces(256, 4)
    (128, [Pace(tile=16, num_stages=5), Pace(tile=16, num_stages=3), Pace(tile=16, num_stages=1)])
    """
    largest = max(16, min(128, 16384 // (width * itemsize)))
    tiles = [tile for tile in (128, 64, 32, 16) if tile <= largest]
    return [*(Pace(tile, 5) for tile in tiles), Pace(16, 3), Pace(16, 1)]


def queries_per_tile(rows: int, group: int) -> int:
    """Return how many queries a prefill program of `rows` rows takes when `group` query heads share a KV head.

    >>> queries_per_tile(64, 1), queries_per_tile(64, 4), queries_per_tile(128, 7), queries_per_tile(64, 100)
    (64, 16, 18, 1)
    """
    return max(1, rows // group)


def query_tiles(
    query_start_loc: list[int], context_lens: list[int], seqs: list[int], queries: int
) -> list[tuple[int, int]]:
    """Return a (sequence, first row of q) pair for each tile of `queries` queries of the sequences with indices `seqs`.

    Tiles whose queries see the most keys come first. Programs start in this order, and a long one that started late
    would leave the rest of the GPU idle.

    >>> query_tiles([0, 20, 21, 25], context_lens=[20, 9, 14], seqs=[0, 2], queries=8)
    [(0, 16), (2, 21), (0, 8), (0, 0)]
    """
    starts = query_start_loc
    tiles = [(seq, row) for seq in seqs for row in range(starts[seq], starts[seq + 1], queries)]
    return sorted(tiles, key=lambda tile: starts[tile[0] + 1] - context_lens[tile[0]] - tile[1])  # minus its position
