"""Parts 3 and 5: copies between host and device, and claims about allocating, copying a block, and swapping.

Claim 5: a free list in Python does 833,000 operations per second, 7 times as many as the framework's caching allocator
and 267 times as many as the device's own; the block freed last is kinder to caches than the one freed first.
Claim 13: copying a block takes 1.6 us on the device.
Claim 16: swapping 4,096 tokens takes 46.8 ms, and recomputing them takes 1,024 ms; below about 256 tokens, recomputing
can be cheaper.
Claim 17: pinned memory copies 2 to 5 times as fast as pageable; a block of 5.24 MB takes 0.73 ms from a disk.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from nanovllm.bench.harness import Spread, repeated, with_spreads
from stages.bench.claims import POOLS, books, shape_of_70b, write_in_turn
from stages.bench.decode_step import Case, DecodeStep
from stages.bench.engines import silent
from stages.bench.gpu.common import SHAPES, PartReport, Row, Setup
from stages.bench.locality import BLOCK_OF_70B, copies, disk
from stages.bench.offload import measure_first_token
from stages.s7_cpu_offload.host_tier import HostTier
from stages.s7_cpu_offload.kv_cache import BlockCopy, KVCache

BLOCK_SIZE = 16


def moves(setup: Setup, report: PartReport) -> None:
    """Measure copies in one piece and by block, pinned and pageable, during computation, and to a disk."""
    if not setup.is_cuda:
        report.note("Pinned memory and streams need CUDA. Here a copy is a memcpy, and nothing runs at the same time.")
    sizes = setup.size((2**16, 2**18, 2**20, BLOCK_OF_70B, 2**25, 2**28, 2**30), (2**12, 2**14))
    rounds = setup.size(11, 1)
    rows = [{"bytes": n, **copies(rounds, n, setup.device)} for n in sizes if report.has_time(n)]
    report.table("A copy in one piece, bytes per second (claim 17)", rows)
    report.table(
        "Blocks of 16 tokens, as stage 7 moves them, GB/s", [in_blocks(setup, model) for model in setup.models]
    )
    if report.has_time("loads during steps"):
        report.table("Stage 7: a load during decode steps", [loads_beside_steps(setup)])
    if report.has_time("disk"):
        setup.out.mkdir(parents=True, exist_ok=True)
        size = setup.size(BLOCK_OF_70B, 2**12)
        result = disk(rounds=setup.size(25, 2), num_blocks=1, folder=setup.out, num_bytes=size)
        report.table("A block and a disk, ms (claim 17)", [{"bytes": size, **result}])


class Copies:
    """The blocks of a pool, and their copies in a tier on the host."""

    def __init__(self, setup: Setup, model: str, num_blocks: int) -> None:
        dtype = getattr(torch, setup.dtype)
        self.blocks = KVCache(SHAPES[model], num_blocks, BLOCK_SIZE, dtype, setup.device).blocks
        self.tier = HostTier(self.blocks, num_blocks, silent("s7"))
        self._texts = itertools.count()
        self._hashes: list[bytes] = []
        self.store()

    def store(self) -> None:
        """Store all blocks, as texts that the tier does not have yet."""
        self._hashes = [next(self._texts).to_bytes(8) for _ in self.blocks]
        for block, block_hash in enumerate(self._hashes):
            self.tier.store(block, block_hash)

    def load(self, beside: Callable[[], object] = lambda: None) -> None:
        """Load the stored blocks, make the call at the same time, and wait for the load."""
        held = self.tier.hold(self._hashes)
        self.tier.load([BlockCopy(source, block) for block, source in enumerate(held)])
        beside()
        self.tier.collect(wait=True)


def in_blocks(setup: Setup, model: str) -> Row:
    """Measure stage 7's store and load, a copy per block, and the same bytes in one piece."""
    both = Copies(setup, model, setup.size(256, 4))
    in_one = partial(both.blocks.copy_, both.tier.blocks, non_blocking=True)
    turns = setup.turns({"store": both.store, "load": both.load, "load in one piece": in_one})
    speeds = [{name: both.blocks.nbytes / 1e9 / seconds for name, seconds in each.items()} for each in turns]
    return {"model": model, "bytes per block": both.blocks[0].nbytes, **with_spreads(speeds)}


def loads_beside_steps(setup: Setup) -> Row:
    """Let 32 sequences decode while stage 7 loads the blocks of another text, a copy per block.

    "hidden" is the share of the shorter one that costs no time.
    """
    model, case_size = setup.size("1B", "tiny"), setup.size((32, 512), (2, 24))
    case = Case(model, setup.dtype, *case_size)
    decode = repeated(DecodeStep("s7", setup.folder(model), case, device=str(setup.device)), setup.size(8, 2))
    load = Copies(setup, model, setup.size(512, 4)).load
    turns = setup.turns({"decode": decode, "load": load, "both": partial(load, decode)})
    hidden = [(each["decode"] + each["load"] - each["both"]) / min(each["decode"], each["load"]) for each in turns]
    result = with_spreads([{f"{name} ms": 1000 * seconds for name, seconds in each.items()} for each in turns])
    return {"model": model, "batch": case.batch, **result, **Spread.of(hidden).named("hidden")}


# ---- claims


def claims(setup: Setup, report: PartReport) -> None:
    """Measure allocators, the order of reuse, copies of blocks, and swapping."""
    report.table("Claim 5: take a piece and return it, us", [books(setup.size(9, 1), setup.size(1000, 20))])
    sizes = setup.size((2**20, 2**23, 2**25), (2**10,))
    report.table("Claim 5: which free block is taken, ms for 800 writes", [order_of_reuse(setup, n) for n in sizes])
    shapes = {name: SHAPES[name] for name in setup.models} | setup.size({"70B": shape_of_70b()}, {})
    report.table("Claim 13: copy blocks on the device, us", [block_copies(setup, *each) for each in shapes.items()])
    lengths, folder = setup.size((16, 64, 256, 1024, 4096), (16, 32)), setup.folder(setup.size("1B", "tiny"))
    options = {"device": str(setup.device), "max_num_batched_tokens": 2 * lengths[-1]}
    rows = [
        {"tokens": n, **measure_first_token(folder, setup.dtype, n, **options)} for n in lengths if report.has_time(n)
    ]
    report.table("Claim 16: to the first token, loaded or recomputed, seconds", rows)


def order_of_reuse(setup: Setup, num_bytes: int) -> Row:
    """Measure writes to the blocks freed last, as LIFO takes them, and to those freed first, as FIFO does."""
    num_blocks = setup.size(256, 16)
    memory = torch.zeros(num_blocks, num_bytes // 4, device=setup.device)
    calls = {f"freed {name}": partial(write_in_turn, kind(num_blocks), memory) for name, kind in POOLS.items()}
    return {"bytes": num_bytes, **with_spreads(setup.turns(calls), 1000)}


def block_copies(setup: Setup, name: str, shape: Any) -> Row:
    """Measure copies as stage 5 makes them, 1, 7 or 64 in a batch, and plain copies of one block, many in a row."""
    cache = KVCache(shape, setup.size(256, 8), BLOCK_SIZE, getattr(torch, setup.dtype), setup.device)
    cache.blocks.zero_()
    half, many = cache.num_blocks // 2, setup.size(100, 2)
    calls: dict[str, Callable[[], object]] = {
        f"batch of {count}": partial(cache.copy_blocks, [BlockCopy(i, half + i) for i in range(count)])
        for count in setup.size((1, 7, 64), (1, 2))
    }
    calls["plain copy"] = partial(cache.blocks[half].copy_, cache.blocks[0], non_blocking=True)
    turns = setup.turns({each: repeated(call, many) for each, call in calls.items()})
    return {"model": name, "bytes per block": cache.blocks[0].nbytes, **with_spreads(turns, 1e6 / many)}
