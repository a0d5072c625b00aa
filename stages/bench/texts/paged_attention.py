"""*paged attention*: its BlockManager, its hash of a block, and its online softmax."""

import torch

from stages.bench.texts import attempt, in_stages, rounded, sequence
from stages.bench.texts.prefix_index import BLOCK, Index

STORY, OTHER, SAME, LONG = ([*range(*ends)] for ends in ((3, 19), (100, 116), (200, 216), (3, 4099)))


class Blocks(Index):
    """The text's BlockManager, and its prefix cache. A freed block table keeps its blocks."""

    def append_slot(self, table: list[int], num_tokens: int, block_size: int = BLOCK) -> None:
        last = (num_tokens - 1) // block_size
        if last >= len(table):
            table += self.take()  # without asking whether a block is free
        elif self.counts[table[last]] > 1:
            getattr(self, "_copy_on_write")(table, last)  # noqa: B009  (the text has no such method)

    def allocate(self, tokens: list[int]) -> tuple[list[int], int]:
        """Look up each block by the hash of its own tokens. Return the table and the number of cached tokens."""
        starts = range(0, len(tokens), BLOCK)
        return self.look_up([hash(tuple(tokens[start : start + BLOCK])) for start in starts])


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


def softmax_errors() -> dict[str, float]:
    """Return the relative error of online softmax over full blocks, and where the last of 3 blocks has 6 of 16 keys."""
    torch.manual_seed(0)
    q, old_k, old_v = torch.randn(64), torch.randn(48, 64), torch.randn(48, 64)
    zero_k, zero_v = (torch.cat([old[:38], torch.zeros(10, 64)]) for old in (old_k, old_v))
    errors = dict[str, float]()
    for name, k, v, num_keys, num_slots in (
        ("full", old_k, old_v, 48, 48),
        ("old", old_k, old_v, 38, 48),
        ("zeros", zero_k, zero_v, 38, 48),
        ("masked", old_k, old_v, 38, 38),
    ):
        right = (k[:num_keys].double() @ q.double() / 8).softmax(0) @ v[:num_keys].double()
        result = online_softmax(q, k.view(-1, BLOCK, 64), v.view(-1, BLOCK, 64), num_slots)
        errors[name] = ((result - right).norm() / right.norm()).item()
    return errors


# ---- cases


def full_pool() -> tuple[str, str]:
    text, table = Blocks(1), list[int]()
    ours, seq = in_stages.block_manager("s2", 1, 4), sequence("s2", "a", [1] * 4)
    text.append_slot(table, 1, 4)
    ours.allocate(seq)
    return attempt(lambda: text.append_slot(table, 5, 4)), attempt(lambda: in_stages.append(ours, seq))


def shared() -> str:
    text, table = Blocks(4), list[int]()
    text.append_slot(table, 1)
    text.share(table)
    return attempt(lambda: text.append_slot(table, 2))


def freed_again() -> str:
    text, table, next_one = Blocks(1), list[int](), list[int]()
    text.append_slot(table, 1)
    text.release(table)
    text.release(table)
    once, text.counts[0] = text.counts[0], 0
    text.append_slot(next_one, 1)
    text.release(table)
    return f"a count of {once}; {text.free_ids.count(next_one[0])} free block, which the other one still has"


def softmax() -> str:
    error = {name: rounded(error) for name, error in softmax_errors().items()}
    return (
        f"48 tokens: {error['full']}; 38, empty slots hold old data: {error['old']}; "
        f"38, empty slots hold zeros: {error['zeros']}; 38, empty slots masked: {error['masked']}"
    )


def other_beginning() -> tuple[int, int]:
    text, ours = Blocks(8), in_stages.prefix_cache(8)
    text.allocate(STORY + SAME)
    in_stages.serve(ours, STORY + SAME)
    return text.allocate(OTHER + SAME)[1], in_stages.admit(ours, OTHER + SAME).num_computed_tokens


def repeated() -> int:
    return len({*Blocks(8).allocate(STORY * 3)[0]})


def hits_of_second(prompt: list[int]) -> int:
    """Return how many tokens of a prompt count as cached when it comes again."""
    text = Blocks(512)
    text.allocate(prompt)
    return text.allocate(prompt)[1]


def tail() -> int:
    return hits_of_second(LONG[:40])


def retaken() -> int:
    text = Blocks(2)
    text.release(text.allocate(STORY + SAME)[0])
    text.allocate(OTHER + LONG[300:316])
    return text.allocate(STORY + SAME)[1]


def none_left() -> int:
    return 4096 - hits_of_second(LONG)
