"""Part 3: copies between host and device, in one piece and a block at a time; pinned and pageable; beside computing.

Claim 17: pinned memory copies 2 to 5 times as fast as pageable; a block of 5.24 MB takes 0.73 ms from a disk.
"""

import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stages.bench.decode_step import Case, DecodeStep
from stages.bench.engines import silent
from stages.bench.gpu.common import SHAPES, Report, Row, Setup, wall_seconds
from stages.bench.harness import Spread, take_turns, with_spreads
from stages.s7_cpu_offload.host_tier import HostTier
from stages.s7_cpu_offload.kv_cache import BlockCopy, KVCache

BLOCK = 5_242_880  # bytes: 16 tokens of 80 layers, 8 heads of 128, bfloat16


def measure(setup: Setup, report: Report) -> None:
    if not setup.is_cuda:
        report.note("Pinned memory and streams need CUDA: here a copy is a memcpy, and nothing runs beside it.")
    sizes = setup.size((2**16, 2**18, 2**20, BLOCK, 2**25, 2**28, 2**30), (2**12, 2**14))
    report.table("A copy in one piece, GB/s", [in_one_piece(setup, n) for n in sizes if report.has_time(n)])
    models = setup.size(("135M", "1B"), ("tiny",))
    report.table("Blocks of 16 tokens, as stage 7 moves them, GB/s", [in_blocks(setup, model) for model in models])
    if report.has_time("overlap"):
        report.table("A copy to the device beside multiplications", [overlap(setup)])
    if report.has_time("loads beside steps"):
        report.table("Stage 7: a load beside decode steps", [loads_beside_steps(setup)])
    if report.has_time("disk"):
        report.table("A block and a disk, ms (claim 17)", [on_disk(setup)])


def in_one_piece(setup: Setup, num_bytes: int) -> Row:
    """Both directions, from and to pageable memory, and pinned where there is CUDA."""
    device = torch.empty(num_bytes, dtype=torch.uint8, device=setup.device)
    hosts = {"pageable": torch.ones(num_bytes, dtype=torch.uint8)}
    if setup.is_cuda:
        hosts["pinned"] = torch.ones(num_bytes, dtype=torch.uint8).pin_memory()
    calls: dict[str, Callable[[], object]] = {}
    for kind, host in hosts.items():
        calls[f"to the device, {kind}"] = partial(device.copy_, host, non_blocking=True)
        calls[f"to the host, {kind}"] = partial(host.copy_, device, non_blocking=True)
    times = take_turns({name: wall(setup, call) for name, call in calls.items()}, setup.size(11, 1))
    rates = with_spreads([{name: num_bytes / 1e9 / seconds for name, seconds in each.items()} for each in times])
    row = {"bytes": num_bytes, **rates}
    if setup.is_cuda:
        ways = ("to the device", "to the host")
        row |= {f"{way}, times": rates[f"{way}, pinned"] / rates[f"{way}, pageable"] for way in ways}
    return row


class Copies:
    """The first blocks of a device, and their copies in a tier of the host."""

    def __init__(self, tier: HostTier, num_blocks: int) -> None:
        self._tier, self._num_blocks = tier, num_blocks
        self._texts = itertools.count()
        self._hashes: list[bytes] = []

    def store(self) -> None:
        """Store all blocks, as texts that the tier does not have yet."""
        self._hashes = [next(self._texts).to_bytes(8) for _ in range(self._num_blocks)]
        for block, block_hash in enumerate(self._hashes):
            self._tier.store(block, block_hash)

    def start_load(self) -> None:
        """Start to load what was stored."""
        held = self._tier.hold(self._hashes)
        self._tier.load([BlockCopy(source, block) for block, source in enumerate(held)])

    def load(self) -> None:
        """Load what was stored, and wait for it."""
        self.start_load()
        self._tier.collect(wait=True)


def wall(setup: Setup, call: Callable[[], object]) -> Callable[[], float]:
    return lambda: wall_seconds(setup.device, call)


def in_blocks(setup: Setup, model: str) -> Row:
    """Stage 7's store and load, a copy a block; and the same bytes in one piece."""
    num_blocks = setup.size(256, 4)
    cache = KVCache(SHAPES[model], num_blocks, 16, getattr(torch, setup.dtype), setup.device)
    tier = HostTier(cache.blocks, num_blocks, silent("s7"))
    copies = Copies(tier, num_blocks)
    copies.store()
    calls: dict[str, Callable[[], object]] = {
        "store": copies.store,
        "load": copies.load,
        "load in one piece": lambda: cache.blocks.copy_(tier.blocks, non_blocking=True),
    }
    times = take_turns({name: wall(setup, call) for name, call in calls.items()}, setup.size(11, 1))
    size = cache.blocks.nbytes
    rates = with_spreads([{name: size / 1e9 / seconds for name, seconds in each.items()} for each in times])
    return {"model": model, "bytes a block": size // num_blocks, "blocks": num_blocks, **rates}


# ---- beside computing


def overlap(setup: Setup) -> Row:
    """Multiplications, a copy to the device, and both at once: the copy on a stream of its own, from pinned memory.

    "hidden" is the share of the shorter of the two that costs no time.
    """
    width, bytes_moved = setup.size(8192, 32), setup.size(2**31, 2**12)
    matrix = torch.ones(width, width, dtype=getattr(torch, setup.dtype), device=setup.device)
    copy = copy_to_device(setup, bytes_moved)

    def compute() -> None:
        for _ in range(setup.size(32, 2)):
            torch.mm(matrix, matrix)

    def both() -> None:
        copy()
        compute()

    return {"bytes": bytes_moved, **side_by_side(setup, compute, copy, both)}


def copy_to_device(setup: Setup, bytes_moved: int) -> Callable[[], None]:
    """On CUDA from pinned memory, on a stream of its own."""
    target = torch.empty(bytes_moved, dtype=torch.uint8, device=setup.device)
    source = torch.ones(bytes_moved, dtype=torch.uint8)
    if setup.is_cuda:
        source = source.pin_memory()
    stream = torch.cuda.Stream(setup.device) if setup.is_cuda else None

    def copy() -> None:
        if stream is None:
            target.copy_(source)
            return
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    return copy


def loads_beside_steps(setup: Setup) -> Row:
    """32 sequences decode while stage 7 loads the blocks of another text, a copy a block."""
    model, num_steps = setup.size("1B", "tiny"), setup.size(8, 2)
    case = Case(model, setup.dtype, setup.size(32, 2), setup.size(512, 24))
    step = DecodeStep("s7", setup.folder(model), case, device=str(setup.device))
    num_blocks = setup.size(512, 4)
    cache = KVCache(SHAPES[model], num_blocks, 16, getattr(torch, setup.dtype), setup.device)
    tier = HostTier(cache.blocks, num_blocks, silent("s7"))
    copies = Copies(tier, num_blocks)
    copies.store()

    def both() -> None:
        copies.start_load()
        compute()
        tier.collect(wait=True)

    def compute() -> None:
        for _ in range(num_steps):
            step()

    moved = {"model": model, "batch": case.batch, "steps": num_steps, "bytes": cache.blocks.nbytes}
    return {**moved, **side_by_side(setup, compute, copies.load, both)}


def side_by_side(
    setup: Setup, compute: Callable[[], object], copy: Callable[[], object], both: Callable[[], object]
) -> dict[str, Any]:
    calls = {"compute": compute, "copy": copy, "both": both}
    times = take_turns({name: wall(setup, call) for name, call in calls.items()}, setup.size(9, 1))
    hidden = [(each["compute"] + each["copy"] - each["both"]) / min(each["compute"], each["copy"]) for each in times]
    found = with_spreads([{f"{name} ms": 1000 * seconds for name, seconds in each.items()} for each in times])
    return {**found, **Spread.of(hidden).named("hidden")}


# ---- a disk


def on_disk(setup: Setup) -> Row:
    """Written until it is on the disk, read from the disk, and read again from the system's own cache."""
    size = setup.size(BLOCK, 2**12)
    data = os.urandom(size)
    with tempfile.TemporaryDirectory(dir=setup.out if setup.out.exists() else None) as folder:
        rounds = [disk_round(Path(folder, "block"), data) for _ in range(setup.size(25, 2))]
    return {"bytes": size, **with_spreads(rounds)}


def disk_round(path: Path, data: bytes) -> dict[str, float]:
    marks = [time.perf_counter()]
    with path.open("wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())
        marks.append(time.perf_counter())
        if sys.platform == "linux":  # forget it, so that it is read from the disk
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for _ in range(2):
        marks.append(time.perf_counter())
        path.read_bytes()
        marks.append(time.perf_counter())
    written, read, again = marks[1] - marks[0], marks[3] - marks[2], marks[5] - marks[4]
    return {"write ms": 1000 * written, "read ms": 1000 * read, "read again ms": 1000 * again}
