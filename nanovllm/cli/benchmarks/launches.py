"""What the host starts in a decode step, and how long the step takes: plain operations, kernels, graphs of them.

On a GPU the driver's calls are counted, and the kernels that ran. Elsewhere torch's operations are, views among them.
"""

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType

from ...llm import LLM
from ..compiling import compiled_llm
from .answers import as_deltas
from .report import machine
from .timing import IDS
from .workload import random_tasks

COUNTED_STEPS, WARM_UP_STEPS = 10, 5
WAYS_ON_GPU: dict[str, dict[str, Any]] = {  # each an engine of its own, one after the other
    "plain operations": {"attention_backend": "torch"},
    "kernels": {"attention_backend": "triton", "enforce_eager": True},
    "graphs": {"attention_backend": "triton"},
}
CALLS = {  # of CUDA, by how their names begin
    "kernels started": ("cudaLaunchKernel", "cuLaunchKernel"),
    "graphs started": ("cudaGraphLaunch",),
    "copies started": ("cudaMemcpyAsync",),
    "waits": ("cudaStreamSynchronize", "cudaEventSynchronize"),  # cudaDeviceSynchronize: the profiler's, at its end
}
RAN, OPERATIONS = "kernels that ran", "operations of torch"


def measure(engine: dict[str, Any], rounds: int, batch_size: int, input_len: int) -> dict[str, Any]:
    measured: dict[str, dict[str, float]] = {}
    says: list[str] = []
    found: dict[str, Any] = {}
    for name, options in ways(engine).items():
        free_memory()
        try:
            numbers, where = of_a_way(engine | seats(engine, batch_size) | options, rounds, batch_size, input_len)
        except Exception as error:  # too little memory, no triton, a kernel: the other ways are measured
            says.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            continue
        measured[name] = numbers
        says.append(f"{name}: {where.pop('with')}")
        found = found or where
    if not measured:
        raise ValueError("; ".join(says))
    settings = {"batch_size": batch_size, "input_len": input_len, "rounds": rounds, "counted_steps": COUNTED_STEPS}
    says.append("all numbers are those of one step; the time is a median, with nothing being counted")
    return {"bench": "launches", "settings": settings, "machine": found, "measured": measured, "says": says}


def of_a_way(
    engine: dict[str, Any], rounds: int, batch_size: int, input_len: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """Its numbers, and what they belong to. The engine is gone when this returns, or raises."""
    llm = compiled_llm(engine)
    return figures(llm, rounds, batch_size, input_len), machine(llm)


def free_memory() -> None:
    """The next engine's pool takes what the device has free: torch keeps nothing of the engine before."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def ways(engine: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The options of each engine. On a CPU: plain operations, and what was asked for if that is another."""
    device = engine.get("device")
    if torch.device(device).type == "cuda" if device else torch.cuda.is_available():
        return WAYS_ON_GPU
    kernels: dict[str, Any] = {} if engine["attention_backend"] == "torch" else {"kernels": {}}
    return {"plain operations": WAYS_ON_GPU["plain operations"]} | kernels


def seats(engine: dict[str, Any], batch_size: int) -> dict[str, Any]:
    return {"max_num_seqs": max(engine["max_num_seqs"], batch_size)}


def figures(llm: LLM, rounds: int, batch_size: int, input_len: int) -> dict[str, float]:
    """By its name, of one decode step in which all sequences decode."""
    step, num_steps = llm.llm_engine.step, WARM_UP_STEPS + COUNTED_STEPS + rounds
    begin(llm, batch_size, input_len, num_steps)
    for _ in range(WARM_UP_STEPS):
        step()
    counts = count(step, llm.llm_engine.device)
    seconds = statistics.median(timed(step) for _ in range(rounds))
    return {"step ms": 1000 * seconds} | {name: number / COUNTED_STEPS for name, number in counts.items()}


def begin(llm: LLM, batch_size: int, input_len: int, num_steps: int) -> None:
    """From here on each of num_steps steps decodes one token of all sequences."""
    engine, began = llm.llm_engine, set[str]()
    prefills = batch_size * input_len // llm.config.max_num_batched_tokens + 1  # steps; who is early decodes meanwhile
    for task in random_tasks(llm, batch_size, input_len, num_steps + prefills + 1):
        engine.add_request(next(IDS), task.prompt, as_deltas(task))
    while len(began) < batch_size:
        began |= {output.request_id for output in engine.step()}


def timed(step: Callable[[], object]) -> float:
    """Seconds. A step ends with the tokens at the host: nothing is left to wait for."""
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def count(step: Callable[[], object], device: torch.device) -> dict[str, int]:
    """Of COUNTED_STEPS steps, by what was counted."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(COUNTED_STEPS):
            step()
    events = profile.key_averages()
    if device.type == "cuda":
        return tally(events)
    return {OPERATIONS: sum(event.count for event in events if event.key.startswith("aten::"))}


def tally(events: Iterable[Any]) -> dict[str, int]:
    """What the driver was called for, and what ran on the GPU. A copy there is no kernel."""
    found = Counter(dict.fromkeys((*CALLS, RAN), 0))
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.key.startswith(("Memcpy", "Memset")):
            found[RAN] += event.count
        for name, beginnings in CALLS.items():
            if event.key.startswith(beginnings):
                found[name] += event.count
    return dict(found)
