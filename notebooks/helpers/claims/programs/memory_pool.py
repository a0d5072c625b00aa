"""*Memory Pool Management*: its blocks, its benchmark, its defragmentation, and a setting of torch."""

import random

import torch

from notebooks.helpers.claims.programs import Case, attempt, sequence
from stages.bench.engines import silent
from stages.s2_block_manager.block_manager import BlockManager

BLOCK = 16


class Blocks:
    """The text's block allocator."""

    def __init__(self, num_blocks: int) -> None:
        self.free_blocks = list(range(num_blocks))
        self.tables: dict[str, list[int]] = {}
        self.ref_counts: dict[int, int] = {}

    def allocate_sequence(self, name: str, num_tokens: int) -> None:
        table = []
        for _ in range(-(-num_tokens // BLOCK)):
            if not self.free_blocks:  # too late: the blocks of `table` stay taken, and no sequence has them
                raise RuntimeError("out of blocks")
            table.append(self.free_blocks.pop())
            self.ref_counts[table[-1]] = 1
        self.tables[name] = table

    def extend_sequence(self, name: str, num_tokens: int) -> None:
        table = self.tables[name]
        num_held = len(table) * BLOCK  # slots, not tokens: the last block always looks full
        for _ in range(-(-(num_held + num_tokens) // BLOCK) - len(table)):
            table.append(self.free_blocks.pop())

    def share(self, source: str, name: str) -> None:
        self.tables[name] = list(self.tables[source])
        for block in self.tables[name]:
            self.ref_counts[block] += 1

    def free_sequence(self, name: str) -> None:
        for block in self.tables.pop(name):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_blocks.append(block)


def cases() -> list[Case]:
    return [large(), growing(), sharing(), benchmark(), defragmented(), setting()]


def large() -> Case:
    """Ask for more blocks than there are."""
    text, ours = Blocks(4), BlockManager(4, BLOCK, silent("s2"))
    attempt(lambda: text.allocate_sequence("large", 96))
    attempt(lambda: ours.allocate(sequence("s2", "large", [1] * 96)))
    return Case(
        "6 blocks are requested from a pool of 4. How many are free after the error?",
        f"{len(text.free_blocks)}",
        f"{len(ours.pool.free)}",
    )


def growing() -> Case:
    """Extend a sequence one token at a time."""
    text, ours, seq = Blocks(64), BlockManager(64, BLOCK, silent("s2")), sequence("s2", "growing", [1])
    text.allocate_sequence("growing", 1)
    ours.allocate(seq)
    for _ in range(32):
        text.extend_sequence("growing", 1)
        seq.token_ids.append(0)
        ours.append_slot(seq)
    return Case(
        "A sequence grows to 33 tokens, one at a time. How many blocks of 16 does it hold?",
        f"{len(text.tables['growing'])}",
        f"{len(seq.block_table)}",
    )


def sharing() -> Case:
    """Follow the text's example: a prompt of 500 tokens for three requests, two of which are freed."""
    text, counts = Blocks(64), list[int]()
    text.allocate_sequence("first", 500)
    block = text.tables["first"][0]
    for name in ("b", "c"):
        counts.append(text.ref_counts[block])
        text.share("first", name)
    for name in ("b", "c"):
        counts.append(text.ref_counts[block])
        text.free_sequence(name)
    counts.append(text.ref_counts[block])
    return Case(
        "The example of sharing 500 tokens between three requests. Which counts does a block have, and how many blocks "
        "are held at the end? (A comment says 2->1 at the first free.)",
        f"{'->'.join(map(str, counts))}; {64 - len(text.free_blocks)}: the first owner is never freed",
        "every owner is freed, the first one too",
    )


def benchmark(num_blocks: int = 1200, num_operations: int = 10_000) -> Case:
    """Run the text's benchmark: 60% allocations, the rest frees. The pool's size is ours."""
    rng, free, held, done = random.Random(0), list(range(num_blocks)), list[int](), 0
    for _ in range(num_operations):
        if rng.random() < 0.6:
            if not free:  # the loop ends, but its time is divided by num_operations all the same
                break
            held.append(free.pop())
        elif held:
            free.append(held.pop(rng.randrange(len(held))))
        done += 1
    return Case(
        f"A benchmark of {num_operations:,} operations on {num_blocks:,} blocks. How many run?",
        f"{done:,}, until the pool is empty. The time is divided by {num_operations:,}, so an operation seems "
        f"{num_operations / done:.1f} times as fast as it is",
        "stages.bench returns each block that it takes, so all operations run",
    )


def defragmented() -> Case:
    """Defragment three pieces of which the middle one was freed."""
    memory, offsets = torch.zeros(12), {"a": 0, "b": 4, "c": 8}
    for value, start in enumerate(offsets.values(), start=1):
        memory[start : start + 4] = value
    del offsets["b"]
    tensors = {name: torch.empty(4) for name in offsets}  # new memory, while the old memory stays allocated
    offsets = {name: 4 * i for i, name in enumerate(offsets)}  # where nothing was moved to
    return Case(
        "Three pieces, filled with 1, 2 and 3. The second is freed, and the pool is defragmented. What does the "
        "third contain now?",
        f"{memory[offsets['c']]:g}, and {sum(t.numel() for t in tensors.values())} more numbers are allocated",
        "blocks are never moved",
    )


def setting() -> Case:
    """Look up the function with which the text sets up the allocator."""
    return Case(
        f"`torch.cuda.memory.set_allocator_settings`, in torch {torch.__version__.split('+')[0]}",
        attempt(lambda: torch.cuda.memory.set_allocator_settings),
        "the environment variable PYTORCH_CUDA_ALLOC_CONF",
    )
