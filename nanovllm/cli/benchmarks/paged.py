"""What blocks cost in a decode step's attention: the kernel on a paged cache, and on a contiguous one.

On a GPU all layers are one CUDA graph, so that starting kernels costs next to nothing, as in a step of the engine.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ...backends.gpu.graphs import CudaCapture
from ...backends.gpu.linear import seconds_on_gpu
from ...backends.gpu.ops import PLAIN, Ops, triton_ops
from ...checkpoints.sizes import SHAPES
from ...engine.config import EngineConfig, device_name
from .floor import device_bandwidth
from .paged_calls import CONTIGUOUS, SDPA, Attention, Case
from .peers import whole_numbers
from .report import machine_of
from .turns import median, ratio, take_turns

Timed = Callable[[], float]  # a call that tells its seconds


def measure(
    shape: str,
    device: str | None,
    dtype: str | None,
    batch_sizes: str,
    contexts: str,
    block_sizes: str,
    layers: int | None,
    rounds: int,
) -> dict[str, Any]:
    """Raises ValueError for numbers that are none, a context that blocks do not fill, a device that is not here."""
    sizes = [whole_numbers("--block-sizes", block_sizes), whole_numbers("--contexts", contexts)]
    check_sizes(*sizes)
    config = EngineConfig(device=device_name(device), dtype=dtype or "auto")
    where, what = config.torch_device(), config.torch_dtype("bfloat16")
    if where.index is not None:
        torch.cuda.set_device(where)
    batches = whole_numbers("--batch-sizes", batch_sizes)
    cases = [Case(SHAPES[shape], 1, batch, context, what, where) for context in sizes[1] for batch in batches]
    ops = triton_ops() if where.type == "cuda" else PLAIN
    measured, failures = measure_cases(cases, ops, sizes[0], layers, rounds)
    return {
        "bench": "paged",
        "settings": {"shape": shape, "layers": layers or "as they fit", "rounds": rounds},
        "machine": machine_of(where) | {"dtype": str(what).removeprefix("torch.")},
        "measured": measured,
        "says": [*failures, *in_words(ops)],
    }


def check_sizes(block_sizes: list[int], contexts: list[int]) -> None:
    for context in contexts:
        for block_size in block_sizes:
            if context % block_size:
                raise ValueError(f"--contexts {context}: no whole number of blocks of {block_size}")


def measure_cases(
    cases: list[Case], ops: Ops, block_sizes: list[int], layers: int | None, rounds: int
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Numbers of each way by their names, and what is to be said of cases that failed."""
    measured: dict[str, dict[str, Any]] = {}
    failures: list[str] = []
    for case in cases:
        with failure_told(case.name, failures):
            for name, numbers in measure_case(case.fitted(layers), ops, block_sizes, rounds, failures).items():
                measured[name] = measured.get(name, {}) | numbers
    return measured, failures


@contextmanager
def failure_told(name: str, failures: list[str]) -> Iterator[None]:
    """Too little memory, a kernel that this GPU cannot run: all else goes on."""
    try:
        yield
    except Exception as error:
        failures.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")


@torch.inference_mode()
def measure_case(
    case: Case, ops: Ops, block_sizes: list[int], rounds: int, failures: list[str]
) -> dict[str, dict[str, Any]]:
    """Numbers of each way, by their names."""
    bandwidth = device_bandwidth(case.device)
    attention = Attention(case, ops)
    sizes = {f"blocks of {size}": size for size in block_sizes} | {CONTIGUOUS: case.context}
    ways = {name: attention.paged(size) for name, size in sizes.items()} | {SDPA: attention.sdpa()}
    calls: dict[str, Timed] = {}
    for name, way in ways.items():
        with failure_told(f"{case.name}, {name}", failures):
            way.call()  # once before it is recorded: kernels are compiled then
            attention.check(way)
            calls[name] = timed(case.device, way.call)
    found = take_turns(calls, rounds, case.name)
    return {name: figures(case, name, found, bandwidth) for name in calls}


def timed(device: torch.device, call: Callable[[], None]) -> Timed:
    if device.type == "cuda":
        return partial(seconds_on_gpu, CudaCapture()(call))
    return partial(wall_seconds, call)


def wall_seconds(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def figures(case: Case, name: str, found: list[dict[str, float]], bandwidth: float) -> dict[str, Any]:
    """Medians of the rounds; of ratios the least and the largest, too."""
    seconds = median(found, name, float) / case.num_layers
    numbers: dict[str, Any] = {
        f"{case.name}: us a layer": 1e6 * seconds,
        f"{case.name}: share of the bandwidth": case.layer_bytes / seconds / bandwidth,
    }
    if name != CONTIGUOUS and CONTIGUOUS in found[0]:
        numbers[f"{case.name}: times of {CONTIGUOUS}"] = ratio(found, name, CONTIGUOUS, float)
    return numbers


def in_words(ops: Ops) -> list[str]:
    what = "plain operations: their times say nothing of a GPU's kernels" if ops is PLAIN else "Triton's kernels"
    return [
        f"sequences x tokens of each; attention of one new token each, by {what}",
        "sdpa: torch's scaled_dot_product_attention, on the contiguous cache",
        "blocks lie in random order; contiguous: one block for each sequence; ratios: median / least / largest",
    ]
