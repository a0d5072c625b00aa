"""*paged attention*: its BlockManager, its hash of a block, and its online softmax."""

import torch

from stages.bench.engines import silent
from stages.bench.texts import Cases, attempt, rounded, sequence
from stages.bench.texts.prefix_index import admit, cached_manager
from stages.s2_block_manager.block_manager import BlockManager

BLOCK = 16


class Blocks:
    """The text's BlockManager, and its prefix cache."""

    def __init__(self, num_blocks: int, block_size: int = BLOCK) -> None:
        self.block_size, self.free_ids, self.counts = block_size, list(range(num_blocks)), [0] * num_blocks
        self.index = dict[int, int]()

    def append_slot(self, table: list[int], num_tokens: int) -> None:
        last = (num_tokens - 1) // self.block_size
        if last >= len(table):
            table.append(self._take())  # without asking whether a block is free
        elif self.counts[table[last]] > 1:
            getattr(self, "_copy_on_write")(table, last)  # noqa: B009  (the text has no such method)

    def free(self, table: list[int]) -> None:
        for block in table:  # the table keeps them
            self.counts[block] -= 1
            if self.counts[block] == 0:
                self.free_ids.append(block)

    def allocate_cached(self, tokens: list[int]) -> tuple[list[int], int]:
        """Look up each block by the hash of its own tokens. Return the table and the number of cached tokens."""
        table, cached = list[int](), 0
        for start in range(0, len(tokens), self.block_size):
            key = hash(tuple(tokens[start : start + self.block_size]))
            if key in self.index:
                self.counts[self.index[key]] += 1
                cached += self.block_size  # of a short block, too
            else:
                self.index[key] = self._take()
            table.append(self.index[key])
        return table, cached

    def _take(self) -> int:
        block = self.free_ids.pop()
        self.counts[block] = 1
        return block


def online_softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Merge attention over blocks as the text does. Keys from `num_keys` on are left out.

    q [head_dim]; k, v [num_blocks, block_size, head_dim] -> [head_dim]
    """
    largest, total, out = torch.tensor(-torch.inf), torch.zeros(()), torch.zeros_like(q)
    for block, (keys, values) in enumerate(zip(k, v, strict=True)):
        count = min(num_keys - block * len(keys), len(keys))
        scores = keys[:count] @ q / len(q) ** 0.5
        new = torch.maximum(largest, scores.max())
        weights, kept = (scores - new).exp(), (largest - new).exp()
        total, out, largest = kept * total + weights.sum(), kept * out + weights @ values[:count], new
    return out / total


def softmax_error(num_keys: int, num_slots: int, filler: float | None = None) -> float:
    """Return the relative error of online softmax over `num_slots` slots, of which `num_keys` have keys.

    The others have `filler`, or old data.
    """
    torch.manual_seed(0)
    q, k, v = torch.randn(64), torch.randn(48, 64), torch.randn(48, 64)
    right = (k[:num_keys].double() @ q.double() / 8).softmax(0) @ v[:num_keys].double()
    if filler is not None:
        k[num_keys:], v[num_keys:] = filler, filler
    result = online_softmax(q, k.view(-1, BLOCK, 64), v.view(-1, BLOCK, 64), num_slots)
    return ((result - right).norm() / right.norm()).item()


def cases() -> Cases:
    errors = {
        "48 tokens": softmax_error(48, 48),
        "38, empty slots hold old data": softmax_error(38, 48),
        "38, empty slots hold zeros": softmax_error(38, 48, 0.0),
        "38, empty slots masked": softmax_error(38, 38),
    }
    return {
        "full_pool": full_pool(),
        "shared": (shared(),),
        "freed_again": (freed_again(),),
        "softmax": ("; ".join(f"{name}: {rounded(error)}" for name, error in errors.items()),),
        **prefixes(),
    }


def full_pool() -> tuple[str, str]:
    """Append a fifth token where there is one block of 4 slots."""
    text, ours, seq = Blocks(1, 4), BlockManager(1, 4, silent("s2")), sequence("s2", "a", [1] * 4)
    table = list[int]()
    text.append_slot(table, 1)
    ours.allocate(seq)
    seq.token_ids.append(1)
    return attempt(lambda: text.append_slot(table, 5)), attempt(lambda: ours.append_slot(seq))


def shared() -> str:
    """Append a token to a shared block."""
    text, table = Blocks(4), list[int]()
    text.append_slot(table, 1)
    text.counts[table[0]] = 2
    return attempt(lambda: text.append_slot(table, 2))


def freed_again() -> str:
    """Free a sequence twice: at once, and after another one has taken its block."""
    text, table, next_one = Blocks(1), list[int](), list[int]()
    text.append_slot(table, 1)
    text.free(table)
    text.free(table)
    once, text.counts[0] = text.counts[0], 0
    text.append_slot(next_one, 1)
    text.free(table)
    return f"a count of {once}; {text.free_ids.count(next_one[0])} free block, which the other one still has"


def prefixes() -> Cases:
    """Count hits of a hash that leaves out what comes before a block."""
    story, other, same, long = (
        [*range(start, start + count)] for start, count in ((3, 16), (100, 16), (200, 16), (3, 4096))
    )
    text, short, freed, whole, manager = Blocks(8), Blocks(8), Blocks(2), Blocks(512), cached_manager(8)
    first, second = sequence("s6", "a", story + same), sequence("s6", "b", other + same)
    admit(manager, first)
    first.num_computed_tokens = 32
    manager.cache_blocks(first, 32)
    admit(manager, second)
    text.allocate_cached(story + same)
    short.allocate_cached(long[:40])
    freed.free(freed.allocate_cached(story + same)[0])
    freed.allocate_cached(other + long[300:316])
    whole.allocate_cached(long)
    return {
        "other_beginning": (f"{text.allocate_cached(other + same)[1]}", f"{second.num_computed_tokens}"),
        "repeated": (f"{len({*Blocks(8).allocate_cached(story * 3)[0]})}",),
        "tail": (f"{short.allocate_cached(long[:40])[1]}",),
        "retaken": (f"{freed.allocate_cached(story + same)[1]}",),
        "none_left": (f"{4096 - whole.allocate_cached(long)[1]}",),
    }
