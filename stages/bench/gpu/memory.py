"""Parts 3 and 5: copies between host and device, and claims about allocating, copying a block, and swapping.

Claim 5: a free list in Python does 833,000 operations per second, 7 times as many as the framework's caching allocator
and 267 times as many as the device's own; the block freed last is kinder to caches than the one freed first.
Claim 13: copying a block takes 1.6 us on the device.
Claim 16: swapping 4,096 tokens takes 46.8 ms, and recomputing them takes 1,024 ms; below about 256 tokens, recomputing
can be cheaper.
Claim 17: pinned memory copies 2 to 5 times as fast as pageable; a block of 5.24 MB takes 0.73 ms from a disk.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from nanovllm.bench.harness import Scores, Spread, ratio, ratios, repeated, take_turns, with_spreads
from nanovllm.bench.workload import Task
from stages.bench.claims import POOLS, shape_of_70b, write_in_turn
from stages.bench.decode_step import Case, DecodeStep
from stages.bench.engines import new_sequence, silent, stage
from stages.bench.gpu.common import SHAPES, Calls, PartReport, Row, Setup, rates
from stages.bench.locality import BLOCK_OF_70B, disk
from stages.bench.racing import sampling_params
from stages.bench.workloads import even_prompt
from stages.s2_block_manager.block_pool import BlockPool
from stages.s7_cpu_offload.host_tier import HostTier
from stages.s7_cpu_offload.kv_cache import BlockCopy, KVCache

BLOCK_SIZE = 16


def copies(setup: Setup, report: PartReport) -> None:
    """Measure copies in one piece and by block, pinned and pageable, beside computing, and to a disk."""
    if not setup.is_cuda:
        report.note("Pinned memory and streams need CUDA. Here a copy is a memcpy, and nothing runs at the same time.")
    sizes = setup.size((2**16, 2**18, 2**20, BLOCK_OF_70B, 2**25, 2**28, 2**30), (2**12, 2**14))
    report.table("A copy in one piece, GB/s", [in_one_piece(setup, n) for n in sizes if report.has_time(n)])
    models = setup.size(("135M", "1B"), ("tiny",))
    report.table("Blocks of 16 tokens, as stage 7 moves them, GB/s", [in_blocks(setup, model) for model in models])
    if report.has_time("overlap"):
        report.table("A copy to the device beside multiplications", [overlap(setup)])
    if report.has_time("loads beside steps"):
        report.table("Stage 7: a load beside decode steps", [loads_beside_steps(setup)])
    if report.has_time("disk"):
        setup.out.mkdir(parents=True, exist_ok=True)
        size = setup.size(BLOCK_OF_70B, 2**12)
        result = disk(rounds=setup.size(25, 2), num_blocks=1, folder=setup.out, num_bytes=size)
        report.table("A block and a disk, ms (claim 17)", [{"bytes": size, **result}])


def in_one_piece(setup: Setup, num_bytes: int) -> Row:
    """Measure both directions, with pageable memory, and with pinned memory if there is CUDA."""
    device = torch.empty(num_bytes, dtype=torch.uint8, device=setup.device)
    hosts = {"pageable": torch.ones(num_bytes, dtype=torch.uint8)}
    if setup.is_cuda:
        hosts["pinned"] = hosts["pageable"].pin_memory()
    calls: dict[str, Callable[[], object]] = {}
    for kind, host in hosts.items():
        calls[f"to the device, {kind}"] = partial(device.copy_, host, non_blocking=True)
        calls[f"to the host, {kind}"] = partial(host.copy_, device, non_blocking=True)
    result = with_spreads(rates(setup.turns(calls, 11), num_bytes / 1e9))
    ways = ("to the device", "to the host") if setup.is_cuda else ()
    times = {f"{way}, times": result[f"{way}, pinned"] / result[f"{way}, pageable"] for way in ways}
    return {"bytes": num_bytes, **result, **times}


class Copies:
    """The first blocks of a device's pool, and their copies in a tier on the host."""

    def __init__(self, blocks: torch.Tensor, tier: HostTier, num_blocks: int) -> None:
        """Store the blocks. `blocks` is all of the pool."""
        self.blocks, self.tier, self._num_blocks = blocks, tier, num_blocks
        self._texts = itertools.count()
        self._hashes: list[bytes] = []
        self.store()

    @classmethod
    def of_shape(cls, setup: Setup, model: str, num_blocks: int) -> "Copies":
        """Return copies of a pool of their own."""
        cache = KVCache(SHAPES[model], num_blocks, BLOCK_SIZE, setup.torch_dtype, setup.device)
        return cls(cache.blocks, HostTier(cache.blocks, num_blocks, silent("s7")), num_blocks)

    def store(self) -> None:
        """Store all blocks, as texts that the tier does not have yet."""
        self._hashes = [next(self._texts).to_bytes(8) for _ in range(self._num_blocks)]
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
    num_blocks = setup.size(256, 4)
    copies = Copies.of_shape(setup, model, num_blocks)
    size = copies.blocks.nbytes
    in_one = partial(copies.blocks.copy_, copies.tier.blocks, non_blocking=True)
    calls: dict[str, Callable[[], object]] = {"store": copies.store, "load": copies.load, "load in one piece": in_one}
    result = with_spreads(rates(setup.turns(calls, 11), size / 1e9))
    return {"model": model, "bytes a block": size // num_blocks, "blocks": num_blocks, **result}


def overlap(setup: Setup) -> Row:
    """Measure multiplications, a copy from pinned memory on a stream of its own, and both at once."""
    width, size = setup.size(8192, 32), setup.size(2**31, 2**12)
    matrix = torch.ones(width, width, dtype=setup.torch_dtype, device=setup.device)
    target = torch.empty(size, dtype=torch.uint8, device=setup.device)
    source = torch.ones(size, dtype=torch.uint8, pin_memory=setup.is_cuda)
    stream = torch.cuda.Stream(setup.device) if setup.is_cuda else None

    def copy(beside: Callable[[], object] = lambda: None) -> None:
        with torch.cuda.stream(stream):  # nothing, if there is no stream
            target.copy_(source, non_blocking=True)
        beside()

    compute = repeated(partial(torch.mm, matrix, matrix), setup.size(32, 2))
    return {"bytes": size, **side_by_side(setup, compute, copy)}


def loads_beside_steps(setup: Setup) -> Row:
    """Let 32 sequences decode while stage 7 loads the blocks of another text, a copy per block."""
    model, num_steps = setup.size("1B", "tiny"), setup.size(8, 2)
    case = Case(model, setup.dtype, setup.size(32, 2), setup.size(512, 24))
    step = DecodeStep("s7", setup.folder(model), case, device=str(setup.device))
    copies = Copies.of_shape(setup, model, setup.size(512, 4))
    moved = {"model": model, "batch": case.batch, "steps": num_steps, "bytes": copies.blocks.nbytes}
    return {**moved, **side_by_side(setup, repeated(step, num_steps), copies.load)}


def side_by_side(setup: Setup, compute: Callable[[], object], copy: Callable[..., object]) -> Scores:
    """Measure both alone and at once. "hidden" is the share of the shorter one that costs no time."""
    turns = setup.turns({"compute": compute, "copy": copy, "both": partial(copy, compute)}, 9)
    hidden = [(each["compute"] + each["copy"] - each["both"]) / min(each["compute"], each["copy"]) for each in turns]
    result = with_spreads([{f"{name} ms": 1000 * seconds for name, seconds in each.items()} for each in turns])
    return {**result, **Spread.of(hidden).named("hidden")}


# ---- claims


def claims(setup: Setup, report: PartReport) -> None:
    """Measure allocators, the order of reuse, copies of blocks, and swapping."""
    report.table("Claim 5: take a piece and give it back, operations a second", [allocators(setup)])
    sizes = setup.size((2**20, 2**23, 2**25), (2**10,))
    report.table("Claim 5: which free block is taken, ms for 800 writes", [order_of_reuse(setup, n) for n in sizes])
    shapes = setup.size(
        {name: SHAPES[name] for name in ("135M", "1B")} | {"70B": shape_of_70b()}, {"tiny": SHAPES["tiny"]}
    )
    report.table("Claim 13: copy blocks on the device, us", [block_copies(setup, *each) for each in shapes.items()])
    if report.has_time("claim 16"):
        report.table("Claim 16: to the first token, loaded or computed again, ms", swap(setup, report))


def allocators(setup: Setup) -> Row:
    """Measure a block of the pool, a tensor from the framework's cache, and a tensor from the device itself."""
    pool, size, many = BlockPool(1024), setup.size(BLOCK_OF_70B, 4096), setup.size(1000, 20)

    def tensor_of_device() -> None:
        torch.empty(size, dtype=torch.uint8, device=setup.device)
        torch.cuda.empty_cache()

    calls: dict[str, tuple[Callable[[], object], int]] = {
        "free list": (lambda: pool.free_blocks(pool.get_new_blocks(1)), many),
        "framework": (lambda: torch.empty(size, dtype=torch.uint8, device=setup.device), many),
    }
    if setup.is_cuda:
        calls["device"] = (tensor_of_device, max(many // 20, 1))
    turns = setup.turns({name: repeated(*each) for name, each in calls.items()}, 9)
    speeds = [{name: 2 * calls[name][1] / seconds for name, seconds in each.items()} for each in turns]
    return with_spreads(speeds) | ratios(
        speeds, {f"times the {name}": ("free list", name) for name in calls if name != "free list"}
    )


def order_of_reuse(setup: Setup, num_bytes: int) -> Row:
    """Measure writes to the blocks freed last, as LIFO takes them, and to those freed first, as FIFO does."""
    num_blocks = setup.size(256, 16)
    memory = torch.zeros(num_blocks, num_bytes // 4, device=setup.device)
    calls = {f"freed {name}": partial(write_in_turn, kind(num_blocks), memory) for name, kind in POOLS.items()}
    return {"bytes": num_bytes, **compare(setup, calls, 1000)}


def compare(setup: Setup, calls: Calls, scale: float) -> Scores:
    """Return the median of each call on the device's clock, and its spread."""
    turns = take_turns({name: setup.on_device(call) for name, call in calls.items()}, setup.size(15, 1))
    return with_spreads(turns, scale)


def block_copies(setup: Setup, name: str, shape: Any) -> Row:
    """Measure copies as stage 5 makes them, 1, 7 or 64 in a batch; and 100 plain copies of one block in a row."""
    cache = KVCache(shape, setup.size(256, 8), BLOCK_SIZE, setup.torch_dtype, setup.device)
    cache.blocks.zero_()
    half, many = cache.num_blocks // 2, setup.size(100, 2)
    calls: dict[str, Callable[[], object]] = {
        f"batch of {count}": partial(cache.copy_blocks, [BlockCopy(i, half + i) for i in range(count)])
        for count in setup.size((1, 7, 64), (1, 2))
    }
    plain = repeated(partial(cache.blocks[half].copy_, cache.blocks[0], non_blocking=True), many)
    alone = compare(setup, {"plain copy": plain}, 1e6 / many)
    return {"model": name, "bytes a block": cache.blocks[0].nbytes, **compare(setup, calls, 1e6), **alone}


def swap(setup: Setup, report: PartReport) -> list[Row]:
    """Measure keys and values of a text's first tokens, by length: stored, loaded, and computed again in one step."""
    lengths, model = setup.size((16, 64, 256, 1024, 4096), (16, 32)), setup.size("1B", "tiny")
    sizes = {"kv_cache_tokens": 2 * lengths[-1]}
    sizes |= {name: lengths[-1] for name in ("max_num_batched_tokens", "kv_offloading_tokens")}
    options = {"device": str(setup.device), "dtype": setup.dtype, "offload_policy": "load", **sizes}
    engine = stage("s7").LLM(setup.folder(model), **options).llm_engine
    rows: list[Row] = []
    for length in itertools.takewhile(report.has_time, lengths):
        copies = Copies(engine.kv_cache.blocks, engine.host_tier, length // BLOCK_SIZE)
        calls = {"store": copies.store, "load": copies.load, "compute": prefill(engine, length)}
        turns = [each | {"both": each["store"] + each["load"]} for each in setup.turns(calls, 11)]
        again = ratio(turns, "compute", "both").named("compute over both")
        rows.append({"tokens": length, **with_spreads(turns, scale=1000), **again})
    setup.synchronize()
    return rows


def prefill(engine: Any, length: int) -> Callable[[], object]:
    """Return a function that computes `length` tokens in one step."""
    prompt = [token % engine.model_config.vocab_size for token in even_prompt(length)]
    seq = new_sequence("s7", engine.input_processor, str(length), prompt, sampling_params("s7", Task([], 1)))
    seq.block_table = list(range(-(-length // BLOCK_SIZE)))
    work: Sequence[Any] = [(seq, length)]
    return lambda: engine.model_runner.run(work)
