"""*paged attention*: append_slot() and its hash of a block."""

from notebooks.helpers.claims.programs import Case, attempt, sequence
from notebooks.helpers.claims.programs.prefix_index import admit, cached_manager
from stages.bench.engines import silent
from stages.s2_block_manager.block_manager import BlockManager

BLOCK = 16


class BlockTable:
    """The text's block table, of one sequence."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size, self.free_blocks = block_size, list(range(num_blocks))
        self.table, self.num_tokens = [self.free_blocks.pop()], 1

    def append_slot(self) -> None:
        self.num_tokens += 1
        if self.num_tokens > len(self.table) * self.block_size:
            self.table.append(self.free_blocks.pop())  # without asking whether a block is free


def num_hits(index: set[int], tokens: list[int]) -> int:
    """Look up each full block by the hash of its own tokens, as the text does."""
    starts = range(0, len(tokens) - BLOCK + 1, BLOCK)
    return BLOCK * sum(hash(tuple(tokens[start : start + BLOCK])) in index for start in starts)


def cases() -> list[Case]:
    text, ours, seq = BlockTable(1, 4), BlockManager(1, 4, silent("s2")), sequence("s2", "a", [1] * 4)
    for _ in range(3):
        text.append_slot()
    ours.allocate(seq)
    seq.token_ids.append(1)
    full = Case(
        "The pool has one block of 4 slots, and its sequence gets a fifth token.",
        f"{attempt(text.append_slot)}; it counts {text.num_tokens} tokens in {len(text.table) * 4} slots",
        f"{attempt(lambda: ours.append_slot(seq))}; nothing has changed",
    )
    story, other, same = list(range(3, 19)), list(range(100, 116)), list(range(200, 216))
    index = {hash(tuple(block)) for block in (story, same)}  # a prompt of two blocks was computed
    manager, first, second = cached_manager(8), sequence("s6", "a", story + same), sequence("s6", "b", other + same)
    admit(manager, first)
    first.num_computed_tokens = 32
    manager.cache_blocks(first, 32)
    admit(manager, second)
    return [
        full,
        Case(
            "Two prompts differ in their first 16 tokens, and agree in the next 16. How many tokens of the second hit?",
            f"{num_hits(index, other + same)}, with keys and values that were computed after another beginning",
            f"{second.num_computed_tokens}: a block's hash includes the blocks before it",
        ),
    ]
