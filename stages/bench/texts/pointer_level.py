"""*vLLM v1 Block Manager*: its KVCacheManager, its offloading pipeline, and its scheduling loop."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from stages.bench.engines import silent, without_model
from stages.bench.models import STORYTELLER
from stages.bench.texts import Cases, attempt, sequence
from stages.s2_block_manager.block_manager import BlockManager
from stages.s4_continuous_batching import SamplingParams

BLOCK = 16


# ---- KVCacheManager


class KVCacheManager:
    """The text's manager: ids 0 .. num_gpu - 1 on the GPU, the next num_cpu on the host, the highest on top.

    A number stands for a block's data. With `is_mended`, a block of the host keeps its row: its id - num_gpu.
    """

    def __init__(self, num_gpu: int, num_cpu: int, num_layers: int = 4, is_mended: bool = False) -> None:
        self.num_gpu, self.is_mended, self.counts = num_gpu, is_mended, [0] * (num_gpu + num_cpu)
        self.free_ids = {"gpu": list(range(num_gpu)), "cpu": list(range(num_gpu, num_gpu + num_cpu))}
        self.gpu, self.cpu = torch.zeros(num_layers, num_gpu), torch.zeros(num_layers, num_cpu)
        self.tables = dict[int, list[int]]()

    def alloc(self, seq: int, num_tokens: int) -> list[int]:
        count = -(-num_tokens // BLOCK)
        if count > len(self.free_ids["gpu"]):
            raise RuntimeError("out of GPU blocks")
        self.tables[seq] = table = [self.free_ids["gpu"].pop() for _ in range(count)]
        for block in table:
            self.counts[block] = 1
        return table

    def free(self, seq: int) -> None:
        for block in self.tables.pop(seq):
            self.counts[block] -= 1
            if self.counts[block] == 0:
                self.free_ids["gpu" if block < self.num_gpu else "cpu"].append(block)

    def row(self, cpu_id: int) -> int:
        """Return the row of a block of the host. The text's changes with every allocation."""
        return cpu_id - (self.num_gpu if self.is_mended else len(self.free_ids["gpu"]))

    def offload(self, seq: int) -> None:
        def copy(new: int, old: int) -> None:
            for cpu, gpu in zip(self.cpu, self.gpu, strict=True):
                cpu[self.row(new)].copy_(gpu[old])

        self._move(seq, "cpu", copy)

    def restore(self, seq: int) -> None:
        def copy(new: int, old: int) -> None:
            for cpu, gpu in zip(self.cpu, self.gpu, strict=True):
                gpu[new].copy_(cpu[self.row(old)])

        self._move(seq, "gpu", copy)

    def _move(self, seq: int, to: str, copy: Callable[[int, int], None]) -> None:
        moved, other = list[int](), "gpu" if to == "cpu" else "cpu"
        for block in self.tables[seq]:
            if not self.free_ids[to]:  # the ids in `moved` are lost
                raise RuntimeError(f"no free {to.upper()} blocks")
            new = self.free_ids[to].pop()
            copy(new, block)
            self.counts[new] = 1
            moved.append(new)
        for block in self.tables[seq]:  # shared blocks, too
            self.counts[block] = 0
            self.free_ids[other].append(block)
        self.tables[seq] = moved

    def gpu_utilization(self) -> float:
        num_free = len(self.free_ids["gpu"])
        total = sum(block < num_free for block in range(len(self.counts)))  # not all blocks of the GPU
        return (total - num_free) / max(total, 1)


def its_example(is_mended: bool) -> tuple[KVCacheManager, list[str], str]:
    """Follow the text's example: 100 tokens. Return the manager, what it prints, and how it ends."""
    text, printed = KVCacheManager(1024, 2048, is_mended=is_mended), list[str]()

    def note() -> None:
        printed.append("{}/{}".format(*(len(text.free_ids[where]) for where in ("gpu", "cpu"))))

    def run() -> None:
        table = text.alloc(0, 100)
        text.gpu[:, table] = torch.arange(1.0, len(table) + 1)
        note()
        for move in (text.offload, text.restore):
            move(0)
            note()
        intact = int((text.gpu[0, text.tables[0]] == torch.arange(1.0, len(table) + 1)).sum())
        text.free(0)
        note()
        printed.append(f"{intact} of {len(table)} blocks intact")

    return text, printed, attempt(run)


def failing_pools() -> str:
    """Return how many pools fail at their first offload."""
    pools = [(gpu, cpu, held) for gpu in (8, 64, 1024) for cpu in (1, 8, 64, 512, 1024, 2048) for held in range(1, 6)]
    failed = 0
    for gpu, cpu, held in pools:
        text = KVCacheManager(gpu, cpu, num_layers=1)
        text.alloc(0, held * BLOCK)
        failed += attempt(partial(text.offload, 0)).startswith("IndexError")
    return f"{failed} of {len(pools)}"


def utilization() -> tuple[str, str]:
    """Return the utilization of a GPU whose blocks are all held."""
    text, ours = KVCacheManager(64, 64), BlockManager(64, BLOCK, silent("s2"))
    text.alloc(0, 64 * BLOCK)
    ours.allocate(sequence("s2", "a", [1] * 64 * BLOCK))
    report = ours.report()
    return f"{text.gpu_utilization()}", f"{report.held / report.num_slots}"


def short_host() -> str:
    """Offload three blocks to a host with two, and return what is left."""
    text = KVCacheManager(8, 2, is_mended=True)
    text.alloc(0, 3 * BLOCK)
    error = attempt(lambda: text.offload(0))
    return f"{len(text.free_ids['cpu'])} of 2 ({error})"


def shared_block() -> str:
    """Offload one of two sequences that share a block, and return where the block is then."""
    text = KVCacheManager(8, 8, is_mended=True)
    text.tables[1] = table = list(text.alloc(0, BLOCK))
    text.counts[table[0]] = 2
    text.offload(0)
    given = text.alloc(2, 8 * BLOCK)
    text.free(1)
    freed = "free under the latter" if table[0] in text.free_ids["gpu"] else "still held"
    return f"its other owner and {'a' if table[0] in given else 'no'} new one; when the former ends, it is {freed}"


def twice() -> str:
    """Offload a sequence twice."""
    text = KVCacheManager(8, 8, is_mended=True)
    text.alloc(0, BLOCK)
    text.offload(0)
    return attempt(lambda: text.offload(0))


# ---- offloading pipeline


class Streams:
    """A stand-in for a device: each stream does its work in order, and the default stream gets to its work first."""

    def __init__(self) -> None:
        self.selected = "default"
        self.queues = {"default": deque[Callable[[], object]](), "offload": deque[Callable[[], object]]()}

    @contextmanager
    def current_stream(self, stream: str) -> Iterator[str]:
        yield self.selected  # as torch's: it returns the current stream, and selects none

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


# ---- scheduling loop


@dataclass
class Loop:
    """The text's _schedule(). A request is a name, and holds some blocks. The victim, our choice, is the last one."""

    num_free: int
    swapped: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    num_blocks: dict[str, int] = field(default_factory=dict)  # that each has or needs
    asked: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def schedule(self, victim: int = -1) -> None:
        """Every loop edits the list that it walks, so the next one is skipped."""
        for name in self.swapped:
            if self.num_blocks[name] <= self.num_free:
                self._start(name, self.swapped, "restore")
        for name in self.running:
            self.asked.append(name)
            if self.num_free == 0:  # no room for a token: nothing appends one here, either
                loser = self.running.pop(victim)
                self.swapped.append(loser)
                self.num_free += self.num_blocks[loser]
                self.calls.append(f"offload {loser}")
        for name in self.waiting:
            if self.num_blocks[name] > self.num_free:
                break
            self._start(name, self.waiting, "admit")

    def _start(self, name: str, source: list[str], call: str) -> None:
        source.remove(name)
        self.running.append(name)
        self.num_free -= self.num_blocks[name]
        self.calls.append(f"{call} {name}")


def resumed() -> tuple[str, str]:
    """Return which of eight requests start in one step, if there is room for all."""
    names, started = [str(number) for number in range(8)], []
    for queue in ("swapped", "waiting"):
        text = Loop(100, **{queue: list(names)}, num_blocks=dict.fromkeys(names, 1))
        text.schedule()
        started.append(text.running)
    engine = without_model("s4", model=str(STORYTELLER), kv_cache_tokens=1600)
    for name in names:
        engine.add_request(name, [3] * 10, SamplingParams(max_tokens=4))
    engine.step()
    assert started[0] == started[1], "swapped and waiting requests start alike"
    return ", ".join(started[0]), ", ".join(seq.request_id for seq in engine.scheduler.running)


def cases() -> Cases:
    (text, printed, error), (_, mended, end) = its_example(is_mended=False), its_example(is_mended=True)
    lost, kept = 2048 - len(text.free_ids["cpu"]), len(text.tables[0])
    copies, stored = pipeline("current_stream", holds_until_copied=False)
    early, late = (pipeline("stream", holds_until_copied=holds)[1] for holds in (False, True))
    full = Loop(0, running=list("abc"), num_blocks=dict.fromkeys("abc", 2))
    full.schedule(victim=0)
    tight = Loop(2, swapped=["a"], running=["b"], num_blocks={"a": 2, "b": 2})
    tight.schedule()
    return {
        "example": (f"{', '.join(printed)}, then {error}; {lost} block of the host is lost, {kept} stay in the table",),
        "any_pool": (failing_pools(),),
        "mended": (f"{', '.join(mended)}; {end}",),
        "utilization": utilization(),
        "short_host": (short_host(),),
        "shared": (shared_block(),),
        "twice": (twice(),),
        "stream": (f"{copies['default']} on the default stream, {copies['offload']} there; {stored:g} arrives",),
        "early": (f"{early:g}; {late:g} if the block is held until its copy has ended",),
        "resumed": resumed(),
        "skipped": (", ".join(full.asked),),
        "back_and_forth": (", ".join(tight.calls),),
    }
