"""Parts 2 to 5, and 10: steps of the stages, copies between host and device, claims that a GPU decides, and ranks.

Claim 5: a slab in Python does 833,000 operations per second, 7 times as many as the framework's caching allocator and
267 times as many as the device's own.
Claim 10: paged attention costs 4% of the speed (1,198 tokens per second instead of 1,247, at batch 8) and allows larger
batches with 2 to 4 times the throughput.
Claim 13: copying a block takes 1.6 us on the device.
Claim 16: swapping 4,096 tokens takes 46.8 ms, and recomputing them takes 1,024 ms; below about 256 tokens, recomputing
can be cheaper.
Claim 17: pinned memory copies 2 to 5 times as fast as pageable; a block of 5.24 MB takes 0.73 ms from a disk.
Claim 19: prefill is compute-bound, decode memory-bound.
Claim 28: more than 80% of the reads hit the L2 cache, and decode reaches 70% of the memory's bandwidth.
"""

import csv
import itertools
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from shutil import which
from typing import Any

import torch

from nanovllm.bench.floor import device_bandwidth
from nanovllm.bench.harness import Spread, medians, ratio, repeated, with_spreads
from nanovllm.bench.report import last_line
from stages.bench import allocators, ranks
from stages.bench.claims import shape_of_70b
from stages.bench.decode_step import STAGES, Case, DecodeStep, measure_case
from stages.bench.engines import silent
from stages.bench.gpu.common import SHAPES, PartReport, Row, Setup, run
from stages.bench.locality import BLOCK_OF_70B, copies, disk
from stages.bench.models import num_parameters
from stages.bench.offload import measure_first_token
from stages.s7_cpu_offload.host_tier import HostTier
from stages.s7_cpu_offload.kv_cache import BlockCopy, KVCache

BLOCK_SIZE, LEAST_HIDDEN = 16, 0.5


def decode_steps(setup: Setup, report: PartReport) -> None:
    """Measure a step by model, context and batch, and the memory that it needs besides the pool."""
    batches, contexts = setup.size((1, 8, 32, 64, 128), (1, 2)), setup.size((128, 1024, 4096), (24,))
    cases = {
        f"{model}, context {context}, batch {batch}": partial(row_of, setup, Case(model, setup.dtype, batch, context))
        for model, context, batch in itertools.product(setup.models, contexts, batches)
        if context < SHAPES[model].max_position_embeddings
    }
    report.table("A decode step, milliseconds, and how many times as fast stage 3 is (claim 10)", cases)


def row_of(setup: Setup, case: Case) -> Row:
    """Return the numbers of a case."""
    turns = setup.size((20, 40), (5, 5))
    result = measure_case(case, setup.folder(case.model), STAGES, str(setup.device), turns)
    row = dict[str, Any]()
    for name in (*(f"{stage}_ms" for stage in STAGES), "s3_over_s2", "s3_over_s1"):
        row |= {key: result[key] for key in (name, f"{name}_spread") if key in result}
    row |= {f"{stage} tokens/s": case.batch / (result[f"{stage}_ms"] / 1000) for stage in ("s1", "s3")}
    if setup.is_cuda:
        row |= {f"{stage} MB beside": result[f"{stage}_extra_bytes"] / 1e6 for stage in STAGES}
    return row


# ---- the roofline


def roofline(setup: Setup, report: PartReport) -> None:
    """Measure the two roofs, and how near steps of 1 to 256 sequences and prompts come to the lower one.

    The ratio of a step's operations and bytes decides which roof is lower.
    """
    roofs = report.table("The two roofs", {"device": partial(two_roofs, setup)})["device"]
    flops, bandwidth = roofs["operations/s"], roofs["bytes/s"]
    prompts, context = setup.size((16, 64, 256, 1024, 4096), (8,)), setup.size(512, 24)
    for model in setup.models:
        sizes = [(batch, context, 1) for batch in setup.size((1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 4))]
        sizes += [(1, length, length) for length in prompts if length < SHAPES[model].max_position_embeddings]
        cases = {
            f"decode of {batch} x {length}" if count == 1 else f"prefill of {count}": partial(
                step_row, setup, model, batch, length, count, flops, bandwidth
            )
            for batch, length, count in sizes
        }
        report.table(f"Steps of {model} (claim 19)", cases)


def two_roofs(setup: Setup) -> Row:
    """Measure operations and bytes per second."""
    width, bandwidth = setup.size(8192, 64), device_bandwidth(setup.device)
    matrix = torch.randn(width, width, device=setup.device).to(getattr(torch, setup.dtype))
    flops = 2 * width**3 / medians(setup.turns({"mm": lambda: torch.mm(matrix, matrix)}))["mm"]
    return {"operations/s": flops, "bytes/s": bandwidth, "ridge, operations per byte": flops / bandwidth}


def step_row(setup: Setup, model: str, batch: int, context: int, count: int, flops: float, bandwidth: float) -> Row:
    """Measure a step of `batch` sequences of `context` tokens, of which it computes `count`: 1, or a whole prompt."""
    case = Case(model, setup.dtype, batch, context)
    step = DecodeStep("s3", setup.folder(model), case, device=str(setup.device))
    result = with_spreads(setup.turns({"ms": step.computing(count)}), scale=1000)
    operations, seconds = operations_of(model, batch, context, count), result["ms"] / 1000
    row = {**result, "tokens/s": batch * count / seconds, "operations a byte": operations / step.num_bytes}
    return row | {"of the roof": max(operations / flops, step.num_bytes / bandwidth) / seconds}


def operations_of(model: str, batch: int, context: int, count: int) -> float:
    """Return the operations of a step: two per weight and token, plus those for attention's scores and sums of values.

    The head is computed only for the last token of each sequence.
    """
    shape = SHAPES[model]
    head = shape.vocab_size * shape.hidden_size
    linear = num_parameters(shape) - head  # the tied embedding is the head
    width = shape.num_attention_heads * shape.head_dim * shape.num_hidden_layers
    seen = count * (context - count) + count * (count + 1) / 2  # each token attends to itself and all before it
    return float(batch * (2 * linear * count + 2 * head + 4 * width * seen))


# ---- copies


def moves(setup: Setup, report: PartReport) -> None:
    """Measure copies in one piece and by block, pinned and pageable, during computation, and to a disk."""
    if not setup.is_cuda:
        report.note("Pinned memory and streams need CUDA. Here a copy is a memcpy, and nothing runs at the same time.")
    sizes = setup.size((2**16, 2**18, 2**20, BLOCK_OF_70B, 2**25, 2**28, 2**30), (2**12, 2**14))
    rounds = setup.size(11, 1)
    report.table(
        "A copy in one piece, bytes per second (claim 17)",
        {f"{n:,} bytes": partial(copies, rounds, n, setup.device) for n in sizes},
    )
    in_pools = {model: partial(in_blocks, setup, model) for model in setup.models}
    report.table("Blocks of 16 tokens, as stage 7 moves them, GB/s", in_pools)
    model = setup.size("1B", "tiny")
    report.table("Stage 7: a load during decode steps", {model: partial(loads_beside_steps, setup, model)})
    size = setup.size(BLOCK_OF_70B, 2**12)
    case = partial(disk, rounds=setup.size(25, 2), num_blocks=1, folder=setup.out, num_bytes=size)
    report.table("A block and a disk, ms (claim 17)", {f"{size:,} bytes": case})


class Copies:
    """The blocks of a pool, and their copies in a tier on the host."""

    def __init__(self, setup: Setup, model: str, num_blocks: int, block_size: int = BLOCK_SIZE) -> None:
        dtype = getattr(torch, setup.dtype)
        self.blocks = KVCache(SHAPES[model], num_blocks, block_size, dtype, setup.device).blocks
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
    return {"bytes per block": both.blocks[0].nbytes, **with_spreads(speeds)}


def loads_beside_steps(setup: Setup, model: str) -> Row:
    """Let 32 sequences decode while stage 7 loads the blocks of another text, a copy per block.

    "hidden" is the share of the shorter one that costs no time. The steps take about as long as the load, or their own
    spread would be larger than all that a load can cost. Blocks are large, so that a copy takes longer than its launch.
    """
    case = Case(model, setup.dtype, *setup.size((32, 512), (2, 24)))
    step = DecodeStep("s7", setup.folder(model), case, device=str(setup.device))
    both = Copies(setup, model, *setup.size((256, 256), (4, 4)))
    steps = max(1, round(ratio(setup.turns({"step": step, "load": both.load}), "load", "step").median))
    decode = repeated(step, steps)
    turns = setup.turns({"decode": decode, "load": both.load, "both": partial(both.load, decode)})
    result = with_spreads([{f"{name} ms": 1000 * seconds for name, seconds in each.items()} for each in turns])
    row = {"batch": case.batch, "dtype": case.dtype, "steps": steps, "bytes per block": both.blocks[0].nbytes}
    return row | result | check_hidden(turns, setup.is_cuda)


def check_hidden(turns: Sequence[Mapping[str, float]], overlaps: bool) -> dict[str, Any]:
    """Return the share that is hidden. Raise ValueError if most of it should be, and isn't."""
    shares = [(each["decode"] + each["load"] - each["both"]) / min(each["decode"], each["load"]) for each in turns]
    if overlaps and (hidden := Spread.of(shares)).median < LEAST_HIDDEN:
        raise ValueError(f"copies wait for steps: {hidden.text('of the shorter one is hidden')}")
    return Spread.of(shares).named("hidden")


# ---- claims


def claims(setup: Setup, report: PartReport) -> None:
    """Measure allocators, copies of blocks, and swapping."""
    rounds, size, device = setup.size(5, 1), setup.size(5 * 2**20, 4096), str(setup.device)
    tensors = partial(allocators.tensors, rounds, device, size, setup.size(10_000, 400))
    loops = {"slab": partial(allocators.slab, rounds), "caching": partial(tensors, is_cached=True)}
    report.table("Claim 5: the text's loop", loops | {"device's own": partial(tensors, is_cached=False)})
    shapes = {name: SHAPES[name] for name in setup.models} | setup.size({"70B": shape_of_70b()}, {})
    blocks = {name: partial(block_copies, setup, shape) for name, shape in shapes.items()}
    report.table("Claim 13: copy blocks on the device, us", blocks)
    lengths, model = setup.size((16, 64, 256, 1024, 4096), (16, 32)), setup.size("1B", "tiny")
    options = {"device": str(setup.device), "max_num_batched_tokens": 2 * lengths[-1]}
    swaps = {
        f"{n} tokens": partial(measure_first_token, setup.folder(model), setup.dtype, n, **options) for n in lengths
    }
    report.table("Claim 16: to the first token, loaded or recomputed, seconds", swaps)
    counters(setup, report)


METRICS = {  # of ncu
    "L2 hits": "lts__t_sector_hit_rate.pct",
    "of the memory's bandwidth": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
}


def counters(setup: Setup, report: PartReport) -> None:
    """Read a GPU's own counters of the kernel that attends to blocks, if ncu is installed and may read them."""
    ncu = which("ncu")
    if ncu is None:
        report.note("ncu is not installed: claim 28 needs its counters.")
        return
    bench = ["-m", "stages.bench", "paged", "--contexts", "8192", "--batch-sizes", "8", "--rounds", "1"]
    options = ["--csv", "--page", "raw", "--metrics", ",".join(METRICS.values()), "--launch-count", "20"]
    command = [ncu, *options, "--kernel-name", "regex:attend", sys.executable, *bench]
    title = "Claim 28: counters of paged attention"
    report.table(title, {"8 x 8,192": lambda: read_counters(run(command, setup.seconds_left)[1])})


def read_counters(output: str) -> Row:
    """Return the mean of each counter in ncu's CSV output, which other lines may surround."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    rows = [row for row in csv.DictReader(lines) if row["ID"]]  # the first one has the units
    if not rows:
        raise ValueError(f"ncu counted nothing: {last_line(output)}")
    return {name: statistics.mean(float(row[metric]) for row in rows) for name, metric in METRICS.items()}


def block_copies(setup: Setup, shape: Any) -> Row:
    """Measure copies as stage 5 makes them, 1, 7 or 64 in a batch, and plain copies of one block, many in a row."""
    cache = KVCache(shape, setup.size(256, 8), BLOCK_SIZE, getattr(torch, setup.dtype), setup.device)
    cache.blocks.zero_()
    half, many = cache.num_blocks // 2, setup.size(100, 2)
    copies = [BlockCopy(i, half + i) for i in range(half)]
    calls: dict[str, Callable[[], object]] = {
        f"batch of {count}": partial(cache.copy_blocks, copies[:count]) for count in setup.size((1, 7, 64), (1, 2))
    }
    calls["plain copy"] = partial(cache.blocks[half].copy_, cache.blocks[0], non_blocking=True)
    turns = setup.turns({each: repeated(call, many) for each, call in calls.items()})
    return {"bytes per block": cache.blocks[0].nbytes, **with_spreads(turns, 1e6 / many)}


# ---- ranks


def tensor_parallel(setup: Setup, report: PartReport) -> None:
    """Measure a batch on one device and on all of them."""
    num_ranks = torch.cuda.device_count() if setup.is_cuda else 2
    if num_ranks < 2:
        report.note("There is one device: ranks need several.")
        return
    options = ["--ranks", str(num_ranks), "--device", setup.device.type, "--dtype", setup.dtype]
    options += setup.size([], ["--context", "8", "--rounds", "1"])
    cases = {
        f"{model}, {batch} sequences": partial(rank_row, setup, model, [*options, "--batch", str(batch)])
        for model, batch in itertools.product(setup.models, setup.size((1, 8, 64), (2,)))
    }
    report.table(f"One rank / {num_ranks} ranks", cases)


def rank_row(setup: Setup, model: str, options: list[str]) -> Row:
    """Measure a batch on one rank and on several."""
    return ranks.compare(ranks.parse([str(setup.folder(model)), *options]))
