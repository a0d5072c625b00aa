"""The process of a peer: python worker.py serve_vllm '{"model": "folder", "dtype": "float32", ...}'

    ready    {"version": "0.32.0"}
    job      {"prompts": [[5, 6, 7]], "lengths": [2]}         exactly as many tokens as `lengths` says
    answer   {"tokens": [[8, 9]], "times": [[0.02, 0.03]], "idle_cpu_seconds": 0.0}       or {"error": "what was wrong"}

One JSON line each: jobs on standard input, the rest on standard output. A worker waits for its next job in a read, so
only one engine computes at a time. Nothing of nanovllm is imported: this interpreter does not have it.
"""

import importlib
import json
import os
import sys
import time
from typing import Any, NamedTuple


class Settings(NamedTuple):
    model: str  # a checkpoint folder
    dtype: str
    threads: int
    max_model_len: int
    max_num_seqs: int
    kv_cache_bytes: int  # for that many sequences of that length
    file: str  # the weights in the engine's own format, where it has one
    device: str = "cpu"
    load_format: str = "auto"  # "dummy": random weights of the shape that config.json says
    temperature: float = 0.0
    max_seconds: float | None = None  # then a job ends with the tokens that there are


def main(module: str, settings: str) -> None:
    """The module's load() gives the engine's version and its serve(): prompts and lengths -> tokens and their times."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")

    try:
        version, serve = importlib.import_module(module).load(Settings(**json.loads(settings)))
        answer(version=version)
        used = time.process_time()
        for line in sys.stdin:
            idle = time.process_time() - used  # threads that spin between two jobs would slow the other engines
            job = json.loads(line)
            tokens, times = serve(job["prompts"], job["lengths"])
            answer(tokens=tokens, times=times, idle_cpu_seconds=idle)
            used = time.process_time()
    except Exception as error:
        answer(error=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
