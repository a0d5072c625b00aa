"""How work is split among programs: worked out on the host, in plain Python, so that no kernel waits for it."""

import torch

MAX_SPLITS = 128
PROGRAMS_FOR_SM = 2  # of each multiprocessor: one reads while the other computes
PIECE = 2048  # logits of a program that looks for the likeliest
MAX_GEMV_ROWS = 4  # more sums than theirs do not fit into registers
QUERY_ROWS = 64  # of a program of prefill: a query has one for each query head of a KV head


class DecodeRoom:
    """Memory in which the programs of a decode step leave the attention to their split: allocated once."""

    def __init__(
        self, max_rows: int, num_heads: int, head_dim: int, num_splits: int, device: torch.device | str
    ) -> None:
        self.num_splits = num_splits
        self.parts = torch.empty(max_rows, num_heads, num_splits, head_dim, dtype=torch.float32, device=device)
        self.lses = torch.empty(max_rows, num_heads, num_splits, dtype=torch.float32, device=device)  # log2(sum(exp2))


class LikeliestRoom:
    """Memory for the pieces of the logits. All are [max_rows, num_pieces]."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device | str) -> None:
        shape = max_rows, -(-vocab_size // PIECE)
        # Each begins at an address that 16 divides. A half of a tensor may not: the kernel would be compiled anew.
        self.peaks = torch.empty(shape, dtype=torch.float32, device=device)
        self.totals = torch.empty(shape, dtype=torch.float32, device=device)
        self.places = torch.empty(shape, dtype=torch.int32, device=device)


def choose_splits(rows: int, num_kv_heads: int, num_sms: int) -> int:
    """Enough splits to give each multiprocessor its programs. A CUDA graph fixes this number, not the contexts.

    >>> choose_splits(1, 8, 132), choose_splits(8, 8, 132), choose_splits(256, 8, 132), choose_splits(1, 1, 132)
    (33, 4, 1, 128)
    """
    return max(1, min(MAX_SPLITS, PROGRAMS_FOR_SM * num_sms // max(1, rows * num_kv_heads)))


def tile_size(width: int, itemsize: int) -> int:
    """Return how many keys a program reads at a time: 16 KiB, so that a few tiles are on their way at once.

    >>> tile_size(128, 2), tile_size(128, 4), tile_size(16, 4), tile_size(256, 4)
    (64, 32, 128, 16)
    """
    return max(16, min(128, 16384 // (width * itemsize)))


def queries_of_tile(group: int) -> int:
    """Return how many queries a program of prefill has if `group` query heads share a KV head.

    >>> queries_of_tile(1), queries_of_tile(4), queries_of_tile(7), queries_of_tile(100)
    (64, 16, 9, 1)
    """
    return max(1, QUERY_ROWS // group)


def query_tiles(query_start_loc: list[int], seqs: list[int], group: int) -> list[tuple[int, int]]:
    """Return a sequence and a first row of q for each program of prefill, for the sequences `seqs` of a step.

    A sequence's last queries come first: they see the most keys, and what starts last should end soon.

    >>> query_tiles([0, 20, 21, 25], seqs=[0, 2], group=8)
    [(0, 16), (0, 8), (0, 0), (2, 21)]
    """
    step = queries_of_tile(group)
    return [(seq, row) for seq in seqs for row in range(query_start_loc[seq], query_start_loc[seq + 1], step)[::-1]]
