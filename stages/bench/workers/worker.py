"""The process of a peer.

    start    python worker.py serve_vllm:load '{"model": "folder", "dtype": "float32", ...}'
    ready    {"version": "0.32.0"}
    job      {"prompts": [[5, 6, 7]], "lengths": [2]}         lengths: the tokens to generate for each prompt
    result   {"tokens": [[8, 9]], "times": [[0.02, 0.03]], "idle_cpu_seconds": 0.0}       or {"error": "no memory"}

Each is one line of JSON. Jobs come on standard input, and results go to standard output. A worker blocks in a read
until its next job, so only one engine computes at a time. This file doesn't import nanovllm, because the interpreter
that runs it may not have it.
"""

import importlib
import json
import os
import sys
import time
from typing import Any, NamedTuple


class Settings(NamedTuple):
    """The settings of the engine that serves the jobs."""

    model: str  # a checkpoint folder
    dtype: str  # of weights, keys and values
    threads: int
    max_model_len: int
    max_num_seqs: int
    kv_cache_bytes: int  # enough for max_num_seqs sequences of max_model_len tokens
    file: str = ""  # the weights in the engine's own format, if it has one
    device: str = "cpu"
    load_format: str = "auto"  # "dummy": random weights of the shape in config.json
    temperature: float = 0.0
    quantization: str | None = None  # for another process of this engine
    max_seconds: float | None = None  # then a job ends with the tokens it has
    kv_unified: bool = False  # llama.cpp: all sequences share one cache


def main(loader: str, settings: str) -> None:
    """Load an engine and serve jobs. A loader returns the version, and serve(prompts, lengths) -> tokens, times."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # a library's own output must not mix with the results

    def write(**values: Any) -> None:
        results.write(json.dumps(values) + "\n")

    try:
        module, _, function = loader.partition(":")
        version, serve = getattr(importlib.import_module(module), function)(Settings(**json.loads(settings)))
        write(version=version)
        used = time.process_time()
        for line in sys.stdin:
            idle = time.process_time() - used  # threads that spin between two jobs would slow the other engines
            job = json.loads(line)
            tokens, times = serve(job["prompts"], job["lengths"])
            write(tokens=tokens, times=times, idle_cpu_seconds=idle)
            used = time.process_time()
    except Exception as error:
        write(error=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
