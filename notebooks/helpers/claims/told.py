"""Code of the texts whose fault is a lesson, in our words and with its logic as it is; beside it, what a stage does.

Names are those of the texts where they matter. Each is as short as its fault allows.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import torch

from stages.bench.engines import part
from stages.bench.models import STORYTELLER
from stages.s2_block_manager.block_manager import BlockManager as Blocks
from stages.s2_block_manager.block_pool import NoFreeBlocks
from stages.s5_cow_sampling.block_manager import BlockManager as SharedBlocks
from stages.s6_prefix_caching.block_manager import BlockManager as CachedBlocks


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
                raise NoFreeBlocks("out of blocks")
            table.append(self.free.pop())
        self.tables[name] = table

    def extend_sequence(self, name: str, num_tokens: int) -> None:
        table = self.tables[name]
        have = len(table) * self.block_size  # the fault: blocks are counted, not tokens, so the last one seems full
        for _ in range(-(-(have + num_tokens) // self.block_size) - len(table)):
            table.append(self.free.pop())


def of_blocks() -> list[Case]:
    faulty, mended = WithTwoFaults(4, 16), Blocks(4, 16)
    attempt(lambda: faulty.allocate_sequence("large", 96))
    attempt(lambda: mended.allocate(sequence("s2", "large", [1] * 96)))
    left = len(faulty.free), mended.num_free_blocks
    faulty, mended, growing = WithTwoFaults(64, 16), Blocks(64, 16), sequence("s2", "growing", [1])
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
    told, ours, seq = AppendsUnchecked(1, 4), Blocks(1, 4), sequence("s2", "a", [1] * 4)
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
    manager = SharedBlocks(4, 16)
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


# ---- "vLLM v1 Block Manager": the index


class Index:
    """`allocate_with_prefix_cache`, and `free`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size, self.free_blocks = block_size, list(range(num_blocks - 1, -1, -1))
        self.ref_counts, self.index = [0] * num_blocks, dict[int, int]()

    def allocate(self, tokens: list[int]) -> tuple[list[int], int]:
        table, cached = [], 0
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            key = hash(tuple(tokens[:end]))
            if key in self.index:  # the fault: also after a miss
                block = self.index[key]
                cached += self.block_size
            else:
                block = self.free_blocks.pop()
                self.index[key] = block  # the fault: nothing is computed yet
            self.ref_counts[block] += 1
            table.append(block)
        remaining = len(tokens) - cached
        if 0 < remaining < self.block_size:  # the fault: more than a block remains as soon as one was missed
            table.append(self.free_blocks.pop())
            self.ref_counts[table[-1]] += 1
        return table, cached

    def free(self, table: list[int]) -> None:
        for block in table:
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                self.free_blocks.append(block)  # the fault: the index goes on naming it


class EvictsOldest:
    """The order of use. It checks the count, so nobody loses a block that it holds."""

    def __init__(self) -> None:
        self.lru, self.ref_counts = OrderedDict[int, None](), dict[int, int]()

    def use(self, block: int, count: int) -> None:
        self.ref_counts[block] = count
        self.lru[block] = None
        self.lru.move_to_end(block)

    def evict(self) -> int | None:
        while self.lru:
            block, _ = self.lru.popitem(last=False)
            if self.ref_counts[block] == 0:
                return block  # the fault: a held block before it has been popped, and is not put back
        return None


def of_index() -> list[Case]:
    size = 16
    prompt = list(range(3, 3 + 40))
    table, _ = Index(8, size).allocate(prompt)
    ours, seq = CachedBlocks(8, size, enable_prefix_caching=True), sequence("s6", "a", prompt)
    ours.allocate(seq)
    cases = [
        Case(
            "40 tokens in blocks of 16: how many blocks?",
            f"{len(table)}: the last 8 have no slot",
            f"{len(seq.block_table)}",
        )
    ]

    told = Index(8, size)
    told.allocate(prompt[:33])
    again = sequence("s6", "b", prompt[:33])
    ours.allocate(again)
    cases.append(
        Case(
            "The same prompt before the first was computed: how many tokens hit?",
            f"{told.allocate(prompt[:33])[1]}, of which none is there",
            f"{again.num_computed_tokens}",
        )
    )
    told = Index(3, size)
    told.free(told.allocate(prompt[:33])[0])
    told.allocate(list(range(1000, 1033)))
    cases.append(
        Case(
            "A prompt ends, another takes its blocks, the first comes again: how many tokens hit?",
            f"{told.allocate(prompt[:32])[1]}, with the other's keys and values",
            f"{evicted_hits(prompt[:33], size)}",
        )
    )
    lru = EvictsOldest()
    lru.use(0, count=1)
    lru.use(1, count=0)
    first = lru.evict()
    lru.ref_counts[0] = 0  # its holder ends
    cases.append(
        Case(
            "Block 0 is held, block 1 is not, and one is evicted. Then 0 is let go: which can be evicted now?",
            f"{'none' if lru.evict() is None else 'block 0'}: block {first} went, and block 0 left the order with "
            "it, for good",
            f"{evictable_after()}",
        )
    )
    return cases


def evicted_hits(prompt: list[int], size: int) -> int:
    """What stage 6 finds of a text whose blocks another has taken."""
    manager = CachedBlocks(3, size, enable_prefix_caching=True)
    seqs = [sequence("s6", name, ids) for name, ids in (("a", prompt), ("b", list(range(1000, 1033))), ("c", prompt))]
    for seq in seqs[:2]:
        manager.allocate(seq)
        seq.num_computed_tokens = seq.num_tokens
        manager.cache_blocks(seq, seq.num_tokens)
        manager.free(seq)
    manager.allocate(seqs[2])
    manager.check_integrity()
    return seqs[2].num_computed_tokens


def evictable_after() -> str:
    """Two texts of a block each in a pool of two, one of them held while the other goes; then all can go."""
    manager = CachedBlocks(2, 16, enable_prefix_caching=True)
    held, other = (sequence("s6", name, list(range(start, start + 16))) for name, start in (("a", 3), ("b", 300)))
    for seq in (held, other):
        manager.allocate(seq)
        seq.num_computed_tokens = 16
        manager.cache_blocks(seq, 16)
    manager.free(other)
    third = sequence("s6", "c", list(range(600, 616)))
    manager.allocate(third)
    manager.free(held)
    fourth = sequence("s6", "d", list(range(900, 916)))
    manager.allocate(fourth)
    return f"block {fourth.block_table[0]}: whoever is let go joins the queue"


# ---- "vLLM v1 Block Manager": the offload


class Offload:
    """Ids of host blocks go on where the device's end; both free lists are popped from the end. A copy has only begun
    when offload() returns: copies_end() is the moment at which a GPU would have done it.
    """

    def __init__(self, num_gpu: int, num_cpu: int, row_by_id: bool = False, holds_until_copied: bool = False) -> None:
        self.num_gpu, self.row_by_id, self.holds_until_copied = num_gpu, row_by_id, holds_until_copied
        self.gpu, self.cpu = torch.zeros(num_gpu), torch.zeros(num_cpu)  # a number stands for a block
        self.gpu_free = list(range(num_gpu))
        self.cpu_free = list(range(num_gpu, num_gpu + num_cpu))
        self.pending: list[tuple[torch.Tensor, int]] = []  # (row of the host, block of the device)

    def row(self, cpu_bid: int) -> int:
        if self.row_by_id:  # the mend: a row of the host never changes
            return cpu_bid - self.num_gpu
        return cpu_bid - len(self.gpu_free)  # the fault: it changes with every block that is taken or given back

    def offload(self, gpu_bid: int) -> int:
        cpu_bid = self.cpu_free.pop()
        self.pending.append((self.cpu[self.row(cpu_bid)], gpu_bid))
        if not self.holds_until_copied:  # the fault: the copy has only begun
            self.gpu_free.append(gpu_bid)
        return cpu_bid

    def copies_end(self) -> None:
        for row, gpu_bid in self.pending:
            row.copy_(self.gpu[gpu_bid])
            if self.holds_until_copied:
                self.gpu_free.append(gpu_bid)
        self.pending.clear()


def stored(**mends: bool) -> float:
    """Block 7.0 is offloaded, another takes a block and writes -1.0 to it, the copies end: what the host then has."""
    pools = Offload(8, 4, **mends)
    block = pools.gpu_free.pop()
    pools.gpu[block] = 7.0
    number = pools.offload(block)
    pools.gpu[pools.gpu_free.pop()] = -1.0
    pools.copies_end()
    return pools.cpu[pools.row(number)].item()


def of_offload(num_gpu: int = 8, num_cpu: int = 4) -> list[Case]:
    """The first offload of the text as it is; then with one mend after the other."""
    told = Offload(num_gpu, num_cpu)
    crash = attempt(lambda: told.offload(told.gpu_free.pop()))
    return [
        Case(
            f"The first offload: {num_gpu} blocks on the device, {num_cpu} on the host",
            f"{crash}. The first id of the host is {num_gpu + num_cpu - 1}, and at most {num_gpu - 1} is taken from it",
            "a host block has a number of its own, which is its row",
        ),
        Case(
            "A row for each host block; another takes a device block before the copies end: what is stored of 7?",
            f"{stored(row_by_id=True):g}: the block was given back while its copy was on its way",
            f"{stored(row_by_id=True, holds_until_copied=True):g}: whoever is copied is held; stage 7 stores on the "
            "stream "
            "that computes, so a store comes before the next write",
        ),
    ]


# ---- "vLLM v1 Block Manager": bytes of copies


def offsets(num_blocks: int = 8, layers: int = 4) -> list[tuple[str, int, int, bool]]:
    """For the copy of block 2, in both layouts: pieces, bytes of a piece, and whether the first piece begins at
    `block * bytes of a block`, where a list of pending copies has it begin.
    """
    block_size, heads, dim, found = 16, 8, 128, []
    by_block = torch.empty(num_blocks, layers, 2, block_size, heads, dim, dtype=torch.float16, device="meta")
    by_layer = torch.empty(layers, 2, num_blocks, block_size, heads, dim, dtype=torch.float16, device="meta")
    of_block = by_block[0].nbytes
    for name, part_of in (("[block, layer, ...]", by_block[2]), ("[layer, k or v, block, ...]", by_layer[:, :, 2])):
        pieces = 1 if part_of.is_contiguous() else layers * 2
        starts_there = part_of.storage_offset() * 2 == 2 * of_block
        found.append((name, pieces, of_block // pieces, starts_there))
    return found


def token_bytes_of_a_layer(heads: int = 8, dim: int = 128, itemsize: int = 2) -> int:
    """Keys and values. The table of copies takes 64 KB for it, and 960 KB for 15 slots of 80 layers.

    >>> token_bytes_of_a_layer(), round(15 * 80 * token_bytes_of_a_layer() / 1e6, 1)
    (4096, 4.9)
    """
    return 2 * heads * dim * itemsize


def table(cases: list[Case]) -> str:
    rows = "".join(f"| {case.question} | {case.told} | {case.ours} |\n" for case in cases)
    return "| | as told | here |\n|---|---|---|\n" + rows
