"""Part 0: what works on this device, in two minutes. Each line compares one thing with its plain twin, and times it.

To add a kernel, add its arguments to kernel_arguments(), under its name in Ops: "gemv", or "gemv, one row".
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.backends.gpu.backend import TritonBackend
from nanovllm.backends.gpu.capture import CudaCapture, Launcher
from nanovllm.backends.gpu.graphs import buckets
from nanovllm.backends.gpu.model import seconds_on_gpu
from nanovllm.backends.gpu.ops import PLAIN, triton_ops
from nanovllm.backends.gpu.plain import DecodeMetadata, NormBefore, PrefillMetadata, attend
from nanovllm.backends.gpu.sampler import params_on_device
from nanovllm.backends.gpu.tiles import PREFILL_ROWS, DecodeWorkspace, SamplingWorkspace, queries_per_tile, query_tiles
from nanovllm.backends.torch.model_runner import ModelRunner
from nanovllm.backends.torch.sampler import sample
from nanovllm.bench.engine import Run, serve
from nanovllm.bench.floor import device_bandwidth
from nanovllm.bench.harness import Spread, timed
from nanovllm.bench.workload import random_tasks
from nanovllm.quantization import Format, QuantizedLinear
from nanovllm.requests.tokens import SamplingRow
from stages.bench.gpu.common import SHAPES, PartReport, Row, Setup, note_missing
from stages.bench.gpu.engine import NEEDED
from stages.bench.gpu.parts import loads_beside_steps
from stages.bench.locality import copies

REPEATS = 5
PROMPT, OUTPUT, MAX_MODEL_LEN = 20, 8, 32  # tokens
MODELS, MAX_ROWS = ("135M", "tiny"), (256, 2)  # and the tiny ones
LAYER = 1  # of two, in pools
DTYPE = "float32"  # of the engines: their tokens are the same but for near ties
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # relative and absolute
MAX_DIFFERENT = 0.1  # of all sequences: near ties may be decided otherwise


def measure(setup: Setup, report: PartReport) -> None:
    """Check the device, its copies, each kernel, the sampler, and the engine in each way that it can run."""
    missing, size, model = note_missing(report, NEEDED), setup.size(2**28, 2**12), setup.size(*MODELS)
    report.table("The device", {"device": partial(device, setup)})
    report.table("Pinned memory", {f"{size:,} bytes": partial(copies, setup.size(5, 1), size, setup.device)})
    if "triton" not in missing:
        if not setup.is_cuda:
            import_module("nanovllm.tests.gpu.interpreter").fix_interpreter()
        report.table("Kernels", {name: partial(compare_kernel, setup, name) for name in kernel_arguments(setup)})
    if setup.is_cuda:
        report.table("PyTorch's varlen_attn", {"contiguous": partial(varlen, setup)})
    report.table("The sampler", {name: partial(compare_sampler, setup, name) for name in SAMPLING})
    ways = {name: partial(compare_engine, setup, name) for name in ENGINES}
    engines = report.table("The engine, compared with plain operations", ways)
    if "failed" not in engines["graphs"]:
        sizes = buckets(setup.size(*MAX_ROWS))
        rows = {f"rows: {size}": partial(compare_engine, setup, "graphs", size) for size in sizes}
        report.table("Graphs, by their number of rows", rows)
    report.table("Copies on a stream of their own, beside steps", {model: partial(loads_beside_steps, setup, model)})


# ---- the device


def device(setup: Setup) -> Row:
    """Return the speeds of reading and copying, and what the device is."""
    memory = torch.ones(2, setup.size(2**29, 2**11), device=setup.device)
    seconds = min(each["copy"] for each in setup.turns({"copy": lambda: memory[0].copy_(memory[1])}))
    row: dict[str, Any] = {"read GB/s": device_bandwidth(setup.device) / 1e9}
    row["copy GB/s, read and written"] = memory.nbytes / seconds / 1e9
    if setup.is_cuda:
        known = torch.cuda.get_device_properties(setup.device)
        row |= {"memory GB": known.total_memory / 1e9, "multiprocessors": known.multi_processor_count}
        row |= {"capability": f"{known.major}.{known.minor}", "CUDA": torch.version.cuda}
    return row


def varlen(setup: Setup) -> Row:
    """Return whether torch's varlen_attn takes a block table, and how it differs from plain attention."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = torch.randn(3, 256, 8, 64, device=setup.device, dtype=torch.bfloat16)
    starts = torch.tensor([0, 256], dtype=torch.int32, device=setup.device)
    call: Any = partial(varlen_attn, q, k, v, starts, starts, 256, 256, window_size=(-1, 0))
    takes_table = "yes" if "block_table" in inspect.signature(varlen_attn).parameters else "no"
    row = {"difference": difference(call(), attend(q, k, v)), "dtype": "bfloat16"}
    return row | times_of(setup, "us", call) | {"takes a block table": takes_table}


def times_of(setup: Setup, name: str, call: Callable[[], Any]) -> dict[str, Any]:
    """Return how many microseconds a call takes on the device: the median, the least and the most of several calls."""
    run = partial(seconds_on_gpu, call) if setup.is_cuda else timed(call)
    return Spread.of([1e6 * run() for _ in range(setup.size(REPEATS, 1))]).named(name)


def difference(result: Tensor, expected: Tensor) -> float:
    """Return the largest difference, as a share of the largest number."""
    result, expected = result.float(), expected.float()
    return ((result - expected).abs().max() / expected.abs().max()).item()


# ---- kernels


def kernel_arguments(setup: Setup) -> dict[str, tuple[dict[str, Any], tuple[str, ...]]]:
    """Return the arguments of each kernel, and the names of those that it writes. The full sizes are TinyLlama's."""
    rows, hidden, inner, heads, kv_heads, size, vocab, context, block_size = setup.size(
        (4, 2048, 5632, 32, 4, 64, 32000, 1024, 16), (2, 32, 48, 4, 2, 16, 64, 24, 4)
    )
    device, dtype = setup.device, getattr(torch, setup.dtype)
    random, zeros = (partial(make, device=device, dtype=dtype) for make in (torch.randn, torch.zeros))
    whole = partial(torch.tensor, dtype=torch.int32, device=device)
    at = torch.arange(rows, device=device)
    order = torch.randperm(rows * context // block_size)
    pool = {"blocks": random(len(order), LAYER + 1, 2, block_size, kv_heads, size), "layer": LAYER}
    numbers, lens, tables = [*range(rows)], [context - i for i in range(rows)], order.int().view(rows, -1).to(device)
    starts, group = [i * (context // 2) for i in range(rows + 1)], heads // kv_heads
    prefill = pool | {"q": random(starts[-1], heads, size), "out": zeros(starts[-1], heads, size)}
    few, many = (
        PrefillMetadata(tables, whole(starts), whole(lens), whole(query_tiles(starts, lens, numbers, queries)), each)
        for each, queries in ((each, queries_per_tile(each, group)) for each in PREFILL_ROWS)
    )
    decodes = tables, whole(lens), DecodeWorkspace(rows, heads, size, 8, device), whole(numbers), whole(numbers)
    norm: dict[str, Any] = {"x": random(rows, hidden), "residual": random(rows, hidden), "eps": 1e-5}
    norm |= {"weight": random(hidden)}
    linear = {"weight": random(2 * inner, hidden) / hidden**0.5, "bias": random(2 * inner)}
    wide = torch.nn.Linear(hidden, 2 * inner, device=device, dtype=dtype)
    integers = QuantizedLinear(torch.nn.Linear(hidden, 2 * inner, bias=False, device=device), Format.INT4)
    integers.quantize([linear["weight"]])
    attention = {"q": random(rows, heads, size), "decodes": DecodeMetadata(*decodes), "out": zeros(rows, heads, size)}
    before = {"norm": NormBefore(norm["residual"][:1], zeros(1, hidden), norm["weight"], 1e-5)}
    sampled = [SamplingRow(SamplingParams(**each), i, 0, i) for i, each in enumerate(SAMPLING["mixed"][:rows])]
    sampling = {"logits": random(rows, vocab), "workspace": SamplingWorkspace(rows, vocab, device)}
    sampling |= {"params": params_on_device(sampled, device), "tokens": torch.zeros_like(at)}
    angles = random(context, size // 2).repeat(1, 2)
    rotate: dict[str, Any] = {"qkv": random(rows, heads + 2 * kv_heads, size), "cos": angles.cos(), "sin": angles.sin()}
    rotate |= {"positions": at, "slot_mapping": at, "q_out": zeros(rows, heads, size)}
    rotate |= {"q_norm": 1 + random(size) / 4, "k_norm": 1 + random(size) / 4, "eps": 1e-5}
    embedding, out = {"weight": random(vocab, hidden), "out": zeros(rows, hidden)}, ("out",)
    return {
        "paged_decode": (pool | attention, out),
        "paged_prefill, few rows": (prefill | {"prefills": few}, out),
        "paged_prefill, many rows": (prefill | {"prefills": many}, out),
        "rotate_and_write": (pool | rotate, ("q_out", "blocks")),
        "embed": (embedding | {"input_ids": ~at, "latest_tokens": at}, out),
        "add_rms_norm": (norm | {"out": zeros(rows, hidden)}, ("residual", "out")),
        "silu_and_mul": ({"gate_up": random(rows, 2 * inner), "out": zeros(rows, inner)}, out),
        "sample_rows": (sampling | {"out": torch.zeros(rows, 2, device=device)}, out),
        "gemv, one row": (linear | {"x": random(1, hidden), "out": zeros(1, 2 * inner)}, out),
        "gemv, after a norm": (linear | before | {"x": random(1, hidden), "out": zeros(1, 2 * inner)}, out),
        **{
            f"gemm, {name}, rows: {n}": ({"layer": layer, "x": random(n, hidden), "out": zeros(n, 2 * inner)}, out)
            for name, layer in {setup.dtype: wide, "int4": integers}.items()
            for n in (1, rows, 16 * rows)
        },
        "gated_gemv": (linear | {"x": random(1, hidden), "out": zeros(1, inner)}, out),
        "gated_gemv, after a norm": (linear | before | {"x": random(1, hidden), "out": zeros(1, inner)}, out),
    }


@torch.inference_mode()
def compare_kernel(setup: Setup, name: str) -> Row:
    """Compare a kernel with its twin, then the replay of its graph with the kernel. Raise ValueError if one differs."""
    given, written = kernel_arguments(setup)[name]
    result, twin, replayed = (given | {each: given[each].clone() for each in written} for _ in range(3))
    kernel, plain = (getattr(ops, name.split(",")[0]) for ops in (triton_ops(), PLAIN))
    kernel(**result)
    plain(**twin)
    pairs = [(result[each], twin[each]) for each in written]
    for pair in pairs:
        tolerance = TOLERANCE[pair[0].dtype]
        torch.testing.assert_close(*pair, rtol=tolerance, atol=tolerance)
    apart = max(difference(*pair) for pair in pairs)
    launch: Launcher = partial(kernel, **replayed)
    if setup.is_cuda:
        launch = CudaCapture()(launch)
    launch()
    if not all(torch.equal(replayed[each], result[each]) for each in written):
        raise ValueError("the replay of its graph differs from the kernel")
    row = {"difference": apart, "dtype": setup.dtype, "calls": setup.size(REPEATS, 1)}
    return row | times_of(setup, "us", launch) | times_of(setup, "plain us", partial(plain, **twin))


# ---- the sampler

SAMPLING: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "temperature": [{"temperature": 0.8}],
    "top_k": [{"top_k": 20}],
    "top_p": [{"top_p": 0.9}],
    "min_p": [{"min_p": 0.05}],
    "mixed": [{"temperature": 0.0}, {"temperature": 0.8}, {"top_k": 20, "top_p": 0.9}, {"top_p": 0.9}],
}


@torch.inference_mode()
def compare_sampler(setup: Setup, name: str) -> Row:
    """Compare the kernels' tokens with the plain sampler's on the CPU. Raise ValueError if too many differ."""
    logits = torch.randn(setup.size(64, 8), setup.size(32000, 64), device=setup.device) * 4
    params = [SamplingParams(**each) for each in SAMPLING[name]]
    rows = [SamplingRow(params[i % len(params)], i, 0, i) for i in range(len(logits))]
    backend = runner_of(engine(setup, "kernels without graphs")).backend
    both = backend.sample(logits, rows), sample(logits.cpu(), rows)
    row = count_different(*([[token_id] for token_id in sampled.token_ids] for sampled in both))
    row |= {"rows": len(rows), "dtype": "float32", "calls": setup.size(REPEATS, 1)}
    return row | times_of(setup, "us", lambda: backend.sample(logits, rows))


def count_different(results: list[list[int]], expected: list[list[int]]) -> dict[str, Any]:
    """Return how many sequences differ. Raise ValueError if that can't be due to near ties."""
    count = sum(one != two for one, two in zip(results, expected, strict=True))
    if count > MAX_DIFFERENT * len(results):
        raise ValueError(f"the tokens of {count} of {len(results)} sequences differ")
    return {"different": f"{count} of {len(results)}"}


# ---- the engine

KERNEL_OPTIONS: dict[str, Any] = {"attention_backend": "triton", "async_scheduling": False}
ENGINES: dict[str, dict[str, Any]] = {
    "plain operations": {"attention_backend": "torch", "async_scheduling": False},
    "kernels without graphs": KERNEL_OPTIONS | {"enforce_eager": True},
    "graphs": KERNEL_OPTIONS,
    "graphs, async scheduling": KERNEL_OPTIONS | {"async_scheduling": True},
}


@cache
def engine(setup: Setup, name: str) -> LLM:
    """Return an engine in DTYPE.

    Raise RuntimeError if it has no graphs and should. On a CPU, plain operations stand for kernels and graphs.
    """
    rows: int = setup.size(*MAX_ROWS)
    options: dict[str, Any] = {"device": str(setup.device), "dtype": DTYPE, "skip_tokenizer_init": True}
    options |= {"max_num_seqs": rows, "max_model_len": MAX_MODEL_LEN, "kv_cache_tokens": 2 * rows * MAX_MODEL_LEN}
    options |= {"max_num_batched_tokens": rows * PROMPT}  # all prompts in one step, so that all decode together
    options |= {"block_size": 4, "kv_offloading_tokens": 0, **ENGINES[name]}
    folder = str(setup.folder(setup.size(*MODELS)))
    if setup.is_cuda:
        llm = LLM(folder, **options)
        if name.startswith("graphs") and "CUDA graphs" not in llm.llm_engine.kernels.description:
            raise RuntimeError(llm.llm_engine.kernels.description)
        return llm
    llm = LLM(folder, **options | {"attention_backend": "torch", "enforce_eager": False})
    if name != "plain operations":
        runner = runner_of(llm)
        capture = (lambda step, shares_memory=True: step) if name.startswith("graphs") else None
        parts = runner.model, llm.llm_engine.kv_cache, MAX_MODEL_LEN, PLAIN, capture, rows
        runner.backend = TritonBackend(*parts, progress=False)
    return llm


def runner_of(llm: LLM) -> ModelRunner:
    """Return the executor, which has the backend."""
    assert isinstance(llm.llm_engine.executor, ModelRunner), "the default executor"
    return llm.llm_engine.executor


@cache
def run_of(setup: Setup, name: str, count: int | None = None) -> Run:
    """Return an engine's run of `count` sequences, by default all."""
    tasks = random_tasks(SHAPES[setup.size(*MODELS)].vocab_size, setup.size(*MAX_ROWS), PROMPT, OUTPUT)
    return serve(engine(setup, name), tasks[:count], detokenize=False)


def compare_engine(setup: Setup, name: str, count: int | None = None) -> Row:
    """Compare the tokens of an engine's run with those of plain operations, and time its decode steps."""
    run, expected = run_of(setup, name, count), run_of(setup, "plain operations")
    steps = [1000 * (after - before) for before, after in pairwise(run.times[0])]  # all sequences decode together
    row = count_different(run.tokens, expected.tokens[:count]) | {"dtype": DTYPE, "steps": len(steps)}
    return row | Spread.of(steps).named("step ms")
