"""Kernels, graphs, copies and waits that the host starts in a decode step, and how long the step takes.

On a GPU these are the driver's calls and the kernels that ran. Elsewhere they are torch's operations, views included.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # torch does not list it as exported

from nanovllm.bench.engine import IDS, free_memory, load_llm, params_of
from nanovllm.bench.harness import Spread, repeated, seconds_of
from nanovllm.bench.report import Report, failure_reported, machine, report_of, settings
from nanovllm.bench.workload import check_lengths, random_tasks
from nanovllm.llm import LLM
from nanovllm.options.config import EngineConfig
from stages.bench.options import Launches

COUNTED_STEPS, WARM_UP_STEPS = 10, 5
WAYS_ON_GPU: dict[str, dict[str, Any]] = {  # each way runs in an engine of its own, one after the other
    "plain operations": {"attention_backend": "torch"},
    "kernels": {"attention_backend": "triton", "enforce_eager": True},
    "graphs": {"attention_backend": "triton"},
}
CALLS = {  # of CUDA, by the prefixes of their names
    "kernels started": ("cudaLaunchKernel", "cuLaunchKernel"),
    "graphs started": ("cudaGraphLaunch",),
    "copies started": ("cudaMemcpyAsync",),
    "waits": ("cudaStreamSynchronize", "cudaEventSynchronize"),  # cudaDeviceSynchronize is the profiler's own
}
RAN, OPERATIONS = "kernels that ran", "operations of torch"


def launches(engine: dict[str, Any], options: Launches) -> Report:
    """Measure a decode step in each way. If one fails, report it and measure the others."""
    measured, where, says = dict[str, dict[str, Any]](), dict[str, Any](), list[str]()
    engine = engine | {"max_num_seqs": max(engine["max_num_seqs"] or EngineConfig.max_num_seqs, options.batch_size)}
    for name, way in ways(engine).items():
        free_memory()
        with failure_reported(name, says):
            measured[name], where = measure_way(engine | way, options)
            says.append(f"{name}: {where.pop('with')}")
    if not measured:
        raise ValueError("; ".join(says))
    says.append("all numbers are for one step; the times are the median, the least and the most, without a profiler")
    return report_of("launches", settings(options) | {"counted_steps": COUNTED_STEPS}, where, measured, says)


def measure_way(engine: dict[str, Any], options: Launches) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an engine's numbers and its machine. The engine is freed when this returns or raises."""
    llm = load_llm(engine)
    return numbers(llm, options), machine(llm)


def ways(engine: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options of each engine. On a CPU there are no graphs."""
    device = engine.get("device")
    if torch.device(device).type == "cuda" if device else torch.cuda.is_available():
        return WAYS_ON_GPU
    kernels: dict[str, Any] = {} if engine["attention_backend"] == "torch" else {"kernels": {}}
    return {"plain operations": WAYS_ON_GPU["plain operations"]} | kernels


def numbers(llm: LLM, options: Launches) -> dict[str, Any]:
    """Return the numbers of one step in which all sequences decode."""
    step = llm.llm_engine.step
    start_decoding(llm, options.batch_size, options.input_len, WARM_UP_STEPS + COUNTED_STEPS + options.rounds)
    repeated(step, WARM_UP_STEPS)()
    counts = count(step, llm.llm_engine.device)
    times = Spread.of([1000 * seconds_of(step) for _ in range(options.rounds)])  # a step ends with tokens on the host
    return {"step ms": times._asdict()} | {name: number / COUNTED_STEPS for name, number in counts.items()}


def start_decoding(llm: LLM, batch_size: int, input_len: int, num_steps: int) -> None:
    """Compute the prompts. Each of the next `num_steps` steps decodes one token of every sequence."""
    engine, started = llm.llm_engine, set[str]()
    prefills = batch_size * input_len // llm.config.max_num_batched_tokens + 1  # steps in which early ones decode
    tasks = random_tasks(llm.model_config.vocab_size, batch_size, input_len, num_steps + prefills + 1)
    check_lengths(tasks, llm.max_model_len)
    for task in tasks:
        engine.add_request(next(IDS), task.prompt, params_of(task, detokenize=False))
    while len(started) < batch_size:
        started |= {output.request_id for output in engine.step()}


def count(step: Callable[[], object], device: torch.device) -> dict[str, int]:
    """Return the counts of COUNTED_STEPS steps."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        repeated(step, COUNTED_STEPS)()
    events = profile.key_averages()
    if device.type == "cuda":
        return tally(events)
    return {OPERATIONS: sum(event.count for event in events if event.key.startswith("aten::"))}


def tally(events: Iterable[Any]) -> dict[str, int]:
    """Return the number of driver calls and of kernels. Copies on the GPU don't count as kernels."""
    counts = Counter(dict.fromkeys((*CALLS, RAN), 0))
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.key.startswith(("Memcpy", "Memset")):
            counts[RAN] += event.count
        for name, beginnings in CALLS.items():
            if event.key.startswith(beginnings):
                counts[name] += event.count
    return dict(counts)
