"""Where a step's time goes: torch.profiler here, nsys and ncu where there is a GPU."""

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from stages.bench.counting import silent_stderr
from stages.bench.decode_step import Case, DecodeStep
from stages.bench.models import STORYTELLER

ON_A_GPU = """\
nsys profile -t cuda,nvtx -o step --capture-range=cudaProfilerApi python -m stages 3 "Once upon a time" --device cuda
nsys stats --report cuda_gpu_kern_sum,cuda_gpu_mem_time_sum step.nsys-rep
ncu --set full --kernel-name regex:attention --launch-count 3 python -m stages 3 "Once upon a time" --device cuda
"""
LOOK_AT = {
    "gaps between kernels": "the processor is too slow to launch: fewer, larger operations, or a CUDA graph",
    "copies beside kernels": "do they overlap? if not, which stream waits for which",
    "bytes a second of a kernel": "near the memory's own: only fewer bytes help; far below: see how blocks are read",
    "operations a second of a kernel": "near the arithmetic's own: prefill should be, decode cannot be",
    "cudaMalloc while serving": "none should be there: the pool is allocated once, the rest is cached",
}


def step(batch: int = 8, context: int = 128) -> Any:
    """A decode step of stage 3."""
    return DecodeStep("s3", STORYTELLER, Case("storyteller", "float32", batch, context))


def profiled(call: Any, num_steps: int = 3) -> list[tuple[str, int, float]]:
    """(operation, calls a step, microseconds of its own a step), the dearest first. Two steps warm up."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with (
        silent_stderr(),
        profile(activities=activities, schedule=schedule(wait=1, warmup=1, active=num_steps)) as profiler,
    ):
        for _ in range(2 + num_steps):
            call()
            profiler.step()
    events = [event for event in profiler.key_averages() if not event.key.startswith("ProfilerStep")]
    rows = [(e.key, e.count // num_steps, e.self_cpu_time_total / num_steps) for e in events]
    return sorted(rows, key=lambda row: -row[2])


def table(rows: list[tuple[str, int, float]], shown: int = 8) -> str:
    total = sum(microseconds for _, _, microseconds in rows)
    lines = "".join(f"| `{name}` | {calls} | {us:,.0f} | {us / total:.0%} |\n" for name, calls, us in rows[:shown])
    return "| operation | calls a step | us of its own | share |\n|---|---|---|---|\n" + lines
