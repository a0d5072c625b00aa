"""*vLLM v1 Block Manager*: its KVCacheManager, its offloading pipeline, and its scheduling loop."""

from collections.abc import Callable
from functools import partial

import torch

from stages.bench.engines import without_model
from stages.bench.models import STORYTELLER
from stages.bench.texts import attempt, in_stages, sequence
from stages.s4_continuous_batching import SamplingParams

BLOCK = 16


# ---- KVCacheManager


class KVCacheManager:
    """The text's manager: ids 0 .. num_gpu - 1 on the GPU, the next num_cpu on the host, the highest on top.

    A number stands for a block's data in all layers. With `is_mended`, a block of the host keeps its row: its id -
    num_gpu.
    """

    def __init__(self, num_gpu: int, num_cpu: int, is_mended: bool = True) -> None:
        self.num_gpu, self.is_mended, self.counts = num_gpu, is_mended, [0] * (num_gpu + num_cpu)
        self.free_ids = {"gpu": list(range(num_gpu)), "cpu": list(range(num_gpu, num_gpu + num_cpu))}
        self.gpu, self.cpu, self.tables = torch.zeros(num_gpu), torch.zeros(num_cpu), dict[int, list[int]]()

    def alloc(self, seq: int, num_tokens: int) -> list[int]:
        self.tables[seq] = table = [self.free_ids["gpu"].pop() for _ in range(-(-num_tokens // BLOCK))]
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

    def move(self, seq: int, to: str) -> None:
        """Offload a sequence to "cpu", or restore it to "gpu"."""
        moved, old = list[int](), self.tables[seq]
        for block in old:
            if not self.free_ids[to]:  # the ids in `moved` are lost
                raise RuntimeError(f"no free {to.upper()} blocks")
            new = self.free_ids[to].pop()
            if to == "cpu":
                self.cpu[self.row(new)] = self.gpu[block]
            else:
                self.gpu[new] = self.cpu[self.row(block)]
            self.counts[new] = 1
            moved.append(new)
        for block in old:  # shared blocks, too
            self.counts[block] = 0
        self.free_ids["gpu" if to == "cpu" else "cpu"] += old
        self.tables[seq] = moved

    def gpu_utilization(self) -> float:
        num_free = len(self.free_ids["gpu"])
        total = sum(block < num_free for block in range(len(self.counts)))  # not all blocks of the GPU
        return (total - num_free) / max(total, 1)


def follow_example(text: KVCacheManager) -> tuple[list[str], str]:
    """Follow the text's example: 100 tokens. Return what it prints, and how it ends."""
    printed, data = list[str](), torch.arange(1.0, 8)

    def note() -> None:
        printed.append(f"{len(text.free_ids['gpu'])}/{len(text.free_ids['cpu'])}")

    def run() -> None:
        text.gpu[text.alloc(0, 100)] = data
        note()
        for to in ("cpu", "gpu"):
            text.move(0, to)
            note()
        intact = int((text.gpu[text.tables[0]] == data).sum())
        text.free(0)
        note()
        printed.append(f"{intact} of {len(data)} blocks intact")

    error = attempt(run)
    return printed, error


def example() -> str:
    text = KVCacheManager(1024, 2048, is_mended=False)
    printed, error = follow_example(text)
    lost, kept = 2048 - len(text.free_ids["cpu"]), len(text.tables[0])
    return f"{', '.join(printed)}, then {error}; {lost} block of the host is lost, {kept} stay in the table"


def any_pool() -> str:
    pools = [(gpu, cpu, held) for gpu in (8, 64, 1024) for cpu in (1, 8, 64, 512, 1024, 2048) for held in range(1, 6)]
    failed = 0
    for gpu, cpu, held in pools:
        text = KVCacheManager(gpu, cpu, is_mended=False)
        text.alloc(0, held * BLOCK)
        failed += attempt(partial(text.move, 0, "cpu")).startswith("IndexError")
    return f"{failed} of {len(pools)}"


def mended() -> str:
    printed, error = follow_example(KVCacheManager(1024, 2048))
    return f"{', '.join(printed)}; {error}"


def utilization() -> tuple[float, float]:
    text, ours = KVCacheManager(64, 64), in_stages.block_manager("s2", 64)
    text.alloc(0, 64 * BLOCK)
    ours.allocate(sequence("s2", "a", [1] * 64 * BLOCK))
    report = ours.report()
    return text.gpu_utilization(), report.held / report.num_slots


def short_host() -> str:
    text = KVCacheManager(8, 2)
    text.alloc(0, 3 * BLOCK)
    error = attempt(lambda: text.move(0, "cpu"))
    return f"{len(text.free_ids['cpu'])} of 2 ({error})"


def shared() -> str:
    text = KVCacheManager(8, 8)
    text.tables[1] = table = list(text.alloc(0, BLOCK))
    text.counts[table[0]] = 2
    text.move(0, "cpu")
    given = text.alloc(2, 8 * BLOCK)
    text.free(1)
    freed = "free under the latter" if table[0] in text.free_ids["gpu"] else "still held"
    return f"its other owner and {'a' if table[0] in given else 'no'} new one; when the former ends, it is {freed}"


def twice() -> str:
    text = KVCacheManager(8, 8)
    text.alloc(0, BLOCK)
    text.move(0, "cpu")
    return attempt(lambda: text.move(0, "cpu"))


# ---- offloading pipeline

CURRENT = {"current_stream": "default", "stream": "offload"}  # in a `with` of each call: the first only asks


def pipeline(select: str, holds_until_copied: bool) -> tuple[int, int, float]:
    """Offload block 0, which contains 7, while another sequence takes a block and writes -1 to it.

    Each stream does its work in order, and the default stream gets to its work first. Return the copies on the default
    and on the offload stream, and what the host has in the end.
    """
    gpu, cpu, free = torch.tensor([7.0, 0.0]), torch.zeros(1), [1]
    streams: dict[str, list[Callable[[], object]]] = {"default": [], "offload": []}
    streams[CURRENT[select]].append(lambda: cpu.copy_(gpu[:1]))
    on_default, on_offload = (len(work) for work in streams.values())
    if not holds_until_copied:
        free.append(0)  # before the event of the copy has passed
    block = free.pop()
    streams["default"].append(lambda: gpu[block].fill_(-1))
    for work in streams["default"] + streams["offload"]:
        work()
    return on_default, on_offload, cpu.item()


def stream() -> str:
    default, offload, stored = pipeline("current_stream", holds_until_copied=False)
    return f"{default} on the default stream, {offload} there; {stored:g} arrives"


def early() -> str:
    early, late = (pipeline("stream", holds_until_copied=holds)[-1] for holds in (False, True))
    return f"{early:g}; {late:g} if the block is held until its copy has ended"


# ---- scheduling loop


class Loop:
    """The text's _schedule(). A request is a name, and holds `size` blocks. The victim is our choice."""

    def __init__(self, num_free: int, size: int, swapped: str = "", running: str = "", waiting: str = "") -> None:
        self.num_free, self.size, self.asked, self.calls = num_free, size, list[str](), list[str]()
        self.swapped, self.running, self.waiting = list(swapped), list(running), list(waiting)

    def schedule(self, victim: int = -1) -> None:
        """Every loop edits the list that it walks, so the next one is skipped."""
        for name in self.swapped:
            if self.size <= self.num_free:
                self.start(name, self.swapped, "restore")
        for name in self.running:
            self.asked.append(name)
            if self.num_free == 0:  # no room for a token: nothing appends one here, either
                self.swapped.append(self.running.pop(victim))
                self.num_free += self.size
                self.calls.append(f"offload {self.swapped[-1]}")
        for name in self.waiting:
            if self.size > self.num_free:
                break
            self.start(name, self.waiting, "admit")

    def start(self, name: str, source: list[str], call: str) -> None:
        source.remove(name)
        self.running.append(name)
        self.num_free -= self.size
        self.calls.append(f"{call} {name}")


def resumed() -> tuple[str, str]:
    names = "01234567"
    swapped, waiting = Loop(100, 1, swapped=names), Loop(100, 1, waiting=names)
    for text in (swapped, waiting):
        text.schedule()
    assert swapped.running == waiting.running, "swapped and waiting requests start alike"
    engine = without_model("s4", model=str(STORYTELLER), kv_cache_tokens=1600)
    for name in names:
        engine.add_request(name, [3] * 10, SamplingParams(max_tokens=4))
    engine.step()
    return ", ".join(waiting.running), ", ".join(seq.request_id for seq in engine.scheduler.running)


def skipped() -> str:
    full = Loop(0, 2, running="abc")
    full.schedule(victim=0)
    return ", ".join(full.asked)


def back_and_forth() -> str:
    tight = Loop(2, 2, swapped="a", running="b")
    tight.schedule()
    return ", ".join(tight.calls)
