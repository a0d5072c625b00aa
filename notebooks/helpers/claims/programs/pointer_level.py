"""*vLLM v1 Block Manager*: its KVCacheManager, its offloading pipeline, and its scheduling loop."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from notebooks.helpers.claims.programs import Case, attempt, sequence
from stages.bench.engines import silent, without_model
from stages.bench.models import STORYTELLER
from stages.s2_block_manager.block_manager import BlockManager
from stages.s4_continuous_batching import SamplingParams

BLOCK = 16


# ---- KVCacheManager


@dataclass
class Block:
    """A block of either memory."""

    location: str
    ref_count: int = 0


class KVCacheManager:
    """The text's manager: blocks 0 .. num_gpu - 1 on the GPU, the next num_cpu on the CPU; stacks of free ids.

    The lowest free id is on top, so that the text's example runs. Fields that no step here reads are left out.
    """

    def __init__(self, num_gpu: int, num_cpu: int, num_layers: int = 2) -> None:
        self.blocks = {i: Block("gpu" if i < num_gpu else "cpu") for i in range(num_gpu + num_cpu)}
        self.free_ids = {"gpu": [*range(num_gpu)][::-1], "cpu": [*range(num_gpu, num_gpu + num_cpu)][::-1]}
        self.gpu, self.cpu = torch.zeros(num_layers, num_gpu), torch.zeros(num_layers, num_cpu)  # a number is a block

    def allocate(self, num_tokens: int) -> list[int]:
        count = -(-num_tokens // BLOCK)
        if count > len(self.free_ids["gpu"]):
            raise RuntimeError("out of GPU blocks")
        table = [self.free_ids["gpu"].pop() for _ in range(count)]
        for block in table:
            self.blocks[block].ref_count = 1
        return table

    def offload(self, table: list[int]) -> list[int]:
        return self._move(table, "cpu", lambda row, gpu_id: self.cpu[:, row].copy_(self.gpu[:, gpu_id]))

    def restore(self, table: list[int]) -> list[int]:
        return self._move(table, "gpu", lambda row, gpu_id: self.gpu[:, gpu_id].copy_(self.cpu[:, row]))

    def _move(self, table: list[int], to: str, copy: Callable[[int, int], object]) -> list[int]:
        moved = []
        for block in table:
            if not self.free_ids[to]:  # the ids in `moved` are lost
                raise RuntimeError(f"out of {to.upper()} blocks")
            new = self.free_ids[to].pop()
            cpu_id, gpu_id = (new, block) if to == "cpu" else (block, new)
            copy(cpu_id - len(self.free_ids["gpu"]), gpu_id)  # the row changes with every allocation
            self.blocks[new].ref_count = 1
            moved.append(new)
        for block in table:  # shared blocks too
            self.blocks[block].ref_count = 0
            self.free_ids[self.blocks[block].location].append(block)
        return moved

    def gpu_utilization(self) -> float:
        num_free = len(self.free_ids["gpu"])
        total = sum(block < num_free for block in self.blocks)  # the free ids, not all blocks of the GPU
        return (total - num_free) / total if total else 0.0


def its_example() -> Case:
    """Offload 100 tokens and restore them, in 1,024 and 2,048 blocks."""
    text = KVCacheManager(1024, 2048)
    table = text.allocate(100)
    text.gpu[:, table] = torch.arange(1.0, len(table) + 1)
    back = text.restore(text.offload(table))
    intact = int((text.gpu[0, back] == torch.arange(1.0, len(table) + 1)).sum())
    return Case(
        "Its example: 100 tokens go to the host and come back. How many blocks return with their own data?",
        f"{intact} of {len(table)}; {len(text.free_ids['gpu']):,} blocks are free, as the text prints",
        "a block of the host keeps its row, however many blocks are free",
    )


def utilization() -> Case:
    text, ours = KVCacheManager(64, 64), BlockManager(64, BLOCK, silent("s2"))
    text.allocate(64 * BLOCK)
    ours.allocate(sequence("s2", "a", [1] * 64 * BLOCK))
    report = ours.report()
    return Case(
        "All 64 blocks of the GPU are held. What does `gpu_utilization` say?",
        f"{text.gpu_utilization()}",
        f"{report.held / report.num_slots}",
    )


def full_pool() -> Case:
    text = KVCacheManager(64, 64)
    table = text.allocate(64 * BLOCK)
    return Case(
        "The pool is full, and its sequence is offloaded to an empty host of 64 blocks.",
        attempt(lambda: text.offload(table)),
        "stage 7 evicts one block at a time, into a row of its own",
    )


def short_host() -> Case:
    text = KVCacheManager(8, 2)
    table = text.allocate(3 * BLOCK)
    error = attempt(lambda: text.offload(table))
    return Case(
        "Three blocks are offloaded to a host with two, and fail. How many of the host's blocks are free afterwards?",
        f"{len(text.free_ids['cpu'])} of 2: the other one was taken before the error ({error}), and is lost",
        "the oldest copy makes room for a new one",
    )


def shared_block() -> Case:
    text = KVCacheManager(8, 8)
    table = text.allocate(BLOCK)
    text.blocks[table[0]].ref_count = 2  # two sequences share it
    text.offload(table)
    given = text.allocate(8 * BLOCK)
    return Case(
        "Two sequences share a block, and one of them leaves the GPU. Who may write to the block?",
        f"its other owner, and {'a' if table[0] in given else 'no'} new sequence too: the count was set to 0",
        "its other owner alone: a sequence that leaves lowers the count by 1",
    )


# ---- offloading pipeline


class Streams:
    """A stand-in for a device: each stream does its work in order, and the default stream gets to its work first."""

    def __init__(self) -> None:
        self.selected = "default"
        self.queues = {"default": deque[Callable[[], object]](), "offload": deque[Callable[[], object]]()}

    @contextmanager
    def current_stream(self, stream: str) -> Iterator[str]:
        yield self.selected  # as torch's: it asks which stream is current, and selects none

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.selected = self.selected, stream
        yield
        self.selected = before

    def launch(self, work: Callable[[], object]) -> None:
        self.queues[self.selected].append(work)

    def synchronize(self) -> None:
        for queue in self.queues.values():
            while queue:
                queue.popleft()()


def pipeline(select: str, holds_until_copied: bool) -> tuple[dict[str, int], float]:
    """Offload block 0, which contains 7, while another sequence takes a block and writes -1 to it.

    Return the copies on each stream, and what the host has in the end.
    """
    device, gpu, cpu, free = Streams(), torch.tensor([7.0, 0.0]), torch.zeros(1), [1]
    with getattr(device, select)("offload"):
        device.launch(lambda: cpu.copy_(gpu[:1]))
    if not holds_until_copied:
        free.append(0)  # before the event of the copy has passed
    copies = {name: len(queue) for name, queue in device.queues.items()}
    block = free.pop()
    device.launch(lambda: gpu[block].fill_(-1))
    device.synchronize()
    return copies, cpu.item()


def wrong_stream() -> Case:
    copies, stored = pipeline("current_stream", holds_until_copied=False)
    return Case(
        "`with current_stream(offload_stream)`: on which stream do copies run?",
        f"{copies['default']} on the default stream, {copies['offload']} on the other. Nothing overlaps, so the host "
        f"has the right {stored:g}",
        "stores on the stream that computes, in order; loads on one of their own",
    )


def early_return() -> Case:
    _, lost = pipeline("stream", holds_until_copied=False)
    _, kept = pipeline("stream", holds_until_copied=True)
    return Case(
        "The same with the right stream. A block is freed before it is copied, and written again. What is stored of 7?",
        f"{lost:g}",
        f"{kept:g}, if the block is held until its copy has ended",
    )


# ---- scheduling loop


@dataclass
class Loop:
    """The text's scheduler. A request is a name, and holds some blocks.

    It treats waiting requests like swapped ones. The victim, our choice, is the one with most blocks.
    """

    num_blocks: int
    swapped: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)
    visited: list[str] = field(default_factory=list)

    def pressure(self) -> float:
        return sum(self.held.values()) / self.num_blocks  # 1 - free / total

    def schedule(self) -> None:
        for name in self.swapped:
            if self.pressure() < 0.80:
                self.swapped.remove(name)  # from the list that is iterated: the next one is skipped
                self.held[name] = 1
                self.running.append(name)
        for name in self.running:
            self.visited.append(name)
            if self.pressure() > 0.95:
                victim = max(self.running, key=lambda other: self.held[other])
                self.running.remove(victim)  # here too
                self.swapped.append(victim)
                del self.held[victim]


def resumed() -> Case:
    text = Loop(100, swapped=[str(i) for i in range(8)])
    text.schedule()
    engine = without_model("s4", model=str(STORYTELLER), kv_cache_tokens=1600)
    for number in range(8):
        engine.add_request(str(number), [3] * 10, SamplingParams(max_tokens=4))
    engine.step()
    return Case(
        "Eight requests wait, and there is room for all. How many start in one step?",
        f"{len(text.running)}: every other one is skipped",
        f"{len(engine.scheduler.running)}",
    )


def skipped() -> Case:
    names = list("abcdef")
    text = Loop(60, running=list(names), held={"a": 22, "b": 10, "c": 10, "d": 9, "e": 8, "f": 1})
    text.schedule()
    unvisited = [name for name in names if name not in text.visited and name in text.running]
    return Case(
        "Six requests hold all 60 blocks; the first one, a, holds most, and gives way. Which one is not looked at?",
        f"{', '.join(unvisited)}: it runs on, although nothing has made sure that it has a slot",
        "stage 4 pops victims from the end of a queue, and changes no list that it iterates",
    )


def waiting_for_transfers(steps: int = 10, compute: int = 10, copy: int = 4) -> Case:
    """Compare steps that end in a wait for all transfers with steps that run beside them."""
    waits = sum(compute + copy for _ in range(steps))
    return Case(
        f"{steps} steps of {compute} ms each start a transfer of {copy} ms. When does the last step end?",
        f"after {waits} ms: each step waits for all transfers",
        f"after {steps * compute} ms: only a sequence that needs the blocks waits",
    )


def cases() -> list[Case]:
    manager = [its_example(), utilization(), full_pool(), short_host(), shared_block()]
    return [*manager, wrong_stream(), early_return(), resumed(), skipped(), waiting_for_transfers()]
