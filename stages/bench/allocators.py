"""The loop of *Memory Pool Management* on its slab, on torch's caching allocator, and on the device's own (claim 5).

`python -m stages.bench.allocators DEVICE BYTES OPERATIONS` prints one run on torch's allocator. With UNCACHED set to 1,
torch asks the device for each tensor, so that run needs a process of its own.
"""

import json
import os
import subprocess
import sys
import time
from typing import Any

import torch

from nanovllm.bench.harness import Scores, Spread, seconds_of
from stages.bench.texts import ROOT, memory_pool

UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"


def slab(rounds: int) -> Scores:
    """Return the operations per second of the text's slab: those that ran, before its pool was empty."""
    done = sum(memory_pool.run_benchmark())
    return Spread.of([done / seconds_of(memory_pool.run_benchmark) for _ in range(rounds)]).named("operations/s")


def tensors(rounds: int, device: str, num_bytes: int, num_operations: int, is_cached: bool) -> Scores:
    """Return the operations per second of torch's allocator, and the share of its memory that no tensor has."""
    command = [sys.executable, "-m", "stages.bench.allocators", device, str(num_bytes), str(num_operations)]
    variables = {key: value for key, value in os.environ.items() if key != UNCACHED}  # its mere presence counts
    variables |= {} if is_cached else {UNCACHED: "1"}
    runs = [
        json.loads(subprocess.run(command, cwd=ROOT, env=variables, check=True, capture_output=True, text=True).stdout)
        for _ in range(rounds)
    ]
    speeds = Spread.of([run["operations"] / run["seconds"] for run in runs]).named("operations/s")
    return speeds | {key: runs[0][key] for key in ("operations", "empty share") if key in runs[0]}


def run(device: torch.device, num_bytes: int, num_operations: int) -> dict[str, Any]:
    """Run the text's loop once with tensors, after one tensor to warm up."""
    held = list[torch.Tensor]()
    torch.empty(num_bytes, dtype=torch.uint8, device=device)  # starts the device
    started = time.perf_counter()
    for index in memory_pool.benchmark_steps(num_operations):
        if index is None:
            held.append(torch.empty(num_bytes, dtype=torch.uint8, device=device))
        else:
            del held[index]
    result = {"seconds": time.perf_counter() - started, "operations": num_operations}
    if device.type == "cuda" and (reserved := torch.cuda.max_memory_reserved(device)):
        result["empty share"] = 1 - torch.cuda.max_memory_allocated(device) / reserved
    return result


if __name__ == "__main__":
    name, *numbers = sys.argv[1:]
    print(json.dumps(run(torch.device(name), *map(int, numbers))))
