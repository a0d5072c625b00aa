"""Code of the texts whose fault is a lesson, in our words and with its logic as it is; beside it, what a stage does.

Names are those of the texts where they matter. Each is as short as its fault allows.
"""

from typing import Any, NamedTuple

from stages.bench.engines import part, silent
from stages.bench.models import STORYTELLER
from stages.s2_block_manager.block_manager import BlockManager as Blocks
from stages.s5_cow_sampling.block_manager import BlockManager as SharedBlocks


class Case(NamedTuple):
    question: str
    told: str
    ours: str


def attempt(call: Any) -> str:
    """What a call raises, in words."""
    try:
        call()
    except Exception as error:  # whatever it is, it is shown
        return f'{type(error).__name__}: "{error}"'
    return "nothing is raised"


def sequence(stage: str, name: str, token_ids: list[int]) -> Any:
    config = part(stage, "llama").ModelConfig.from_folder(STORYTELLER)
    made = (
        part(stage, "input_processor")
        .InputProcessor(config, None, 1024, 0)
        .process(name, token_ids, part(stage, "sampling").SamplingParams())
    )
    return made[0] if isinstance(made, list) else made


# ---- "Memory Pool Management": blocks


class WithTwoFaults:
    """
    >>> blocks = WithTwoFaults(num_blocks=4, block_size=16)
    >>> blocks.allocate_sequence("a", 10); blocks.extend_sequence("a", 1); len(blocks.tables["a"])
    2
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size, self.free = block_size, list(range(num_blocks))
        self.tables: dict[str, list[int]] = {}

    def allocate_sequence(self, name: str, num_tokens: int) -> None:
        table = []
        for _ in range(-(-num_tokens // self.block_size)):
            if not self.free:  # the fault: what is in `table` by now belongs to nobody, and is not given back
                raise RuntimeError("out of blocks")
            table.append(self.free.pop())
        self.tables[name] = table

    def extend_sequence(self, name: str, num_tokens: int) -> None:
        table = self.tables[name]
        have = len(table) * self.block_size  # the fault: blocks are counted, not tokens, so the last one seems full
        for _ in range(-(-(have + num_tokens) // self.block_size) - len(table)):
            table.append(self.free.pop())


def of_blocks() -> list[Case]:
    faulty, mended = WithTwoFaults(4, 16), Blocks(4, 16, silent("s2"))
    attempt(lambda: faulty.allocate_sequence("large", 96))
    attempt(lambda: mended.allocate(sequence("s2", "large", [1] * 96)))
    left = len(faulty.free), len(mended.pool.free)
    faulty, mended, growing = WithTwoFaults(64, 16), Blocks(64, 16, silent("s2")), sequence("s2", "growing", [1])
    faulty.allocate_sequence("growing", 1)
    mended.allocate(growing)
    for _ in range(32):
        faulty.extend_sequence("growing", 1)
        growing.token_ids.append(0)
        mended.append_slot(growing)
    counts = [1, 2, 3, 2, 1]  # taken, forked twice, each fork freed: the first owner never lets go
    return [
        Case("6 blocks asked of 4: how many are free afterwards?", f"{left[0]}", f"{left[1]}: compare, then take"),
        Case(
            "33 tokens, one at a time: how many blocks?",
            f"{len(faulty.tables['growing'])}",
            f"{len(growing.block_table)}: tokens are compared with slots",
        ),
        Case(
            "A prompt of 500 tokens is forked twice, and both forks are freed: what is held?",
            f"counts {'->'.join(map(str, counts))}, {-(-500 // 16)} blocks for good; the comment says 2->1 where it "
            "is 3->2",
            "nothing: the first owner is freed as well",
        ),
    ]


# ---- "paged attention": append_slot


class AppendsUnchecked:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size, self.free_blocks = block_size, list(range(num_blocks))
        self.table, self.num_tokens = [self.free_blocks.pop()], 1

    def append_slot(self) -> None:
        self.num_tokens += 1
        if self.num_tokens > len(self.table) * self.block_size:
            self.table.append(self.free_blocks.pop())  # the fault: nobody has asked whether there is one


def of_append_slot() -> Case:
    told, ours, seq = AppendsUnchecked(1, 4), Blocks(1, 4, silent("s2")), sequence("s2", "a", [1] * 4)
    for _ in range(3):
        told.append_slot()
    ours.allocate(seq)
    seq.token_ids.append(1)
    return Case(
        "A pool of one block is full, and its sequence gets one more token",
        f"{attempt(told.append_slot)}; it counts {told.num_tokens} tokens in {len(told.table) * 4} slots",
        f"{attempt(lambda: ours.append_slot(seq))}, nothing changed; stage 4 asks can_append() first, and preempts",
    )


# ---- "PagedAttention: memory layout and kernel analysis": fork


class CountsFromNothing:
    def __init__(self, num_blocks: int) -> None:
        self.free, self.counts = list(range(num_blocks)), [0] * num_blocks
        self.tables: dict[str, list[int]] = {}

    def allocate(self, name: str) -> None:
        self.tables[name] = [self.free.pop()]  # the fault: the count stays 0

    def fork(self, parent: str, child: str) -> None:
        self.tables[child] = list(self.tables[parent])
        for block in self.tables[child]:
            self.counts[block] += 1

    def must_copy(self, name: str) -> bool:
        return self.counts[self.tables[name][-1]] > 1


def of_fork() -> Case:
    told = CountsFromNothing(4)
    told.allocate("parent")
    told.fork("parent", "child")
    manager = SharedBlocks(4, 16, silent("s5"))
    parent, child = (sequence("s5", name, [1] * 5) for name in ("parent", "child"))
    manager.allocate(parent)
    parent.num_computed_tokens = 5
    child.token_ids.append(1)
    parent.token_ids.append(1)
    manager.fork(parent, child)
    answers = [manager.append_slot(seq) for seq in (parent, child)]
    said = ["copies" if answer else "writes in place" for answer in answers]
    return Case(
        "Two hold a block: the parent writes, then the child. Who copies first?",
        f"parent {told.must_copy('parent')}, child {told.must_copy('child')}: both write to one slot",
        f"the parent {said[0]}, the child {said[1]}: taking a block sets its count to 1",
    )


def table(cases: list[Case]) -> str:
    rows = "".join(f"| {case.question} | {case.told} | {case.ours} |\n" for case in cases)
    return "| | as told | here |\n|---|---|---|\n" + rows
