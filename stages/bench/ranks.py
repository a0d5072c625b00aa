"""Tensor parallelism, measured by `python -m stages.bench.ranks [MODEL] [--ranks 2] [--device cpu]`.

One rank and several serve the same batch in turns. It prints what a rank holds, how many all-reduces a decode step
has, and the median time of a step, each for one rank and for several. Part 10 of `make gpu` measures the same.
"""

import argparse
import statistics
import time
from typing import Any

import torch

from nanovllm.backends.torch.model_runner import ModelRunner
from nanovllm.bench.report import shown
from nanovllm.llm_engine import LLMEngine
from nanovllm.options.engine_args import EngineArgs
from nanovllm.requests.sampling_params import SamplingParams


def build(options: argparse.Namespace, num_ranks: int) -> LLMEngine:
    """Return an engine whose batch decodes in every step. Both use plain operations, so that they compare."""
    args = EngineArgs(
        options.model,
        device=options.device,
        dtype=options.dtype,
        max_num_seqs=options.batch,
        max_model_len=options.context + 64,
        kv_cache_tokens=options.batch * (options.context + 128),
        offload_policy="recompute",
        enable_prefix_caching=False,
        attention_backend="torch",
        async_scheduling=False,
        tensor_parallel_size=num_ranks,
    )
    return LLMEngine.from_engine_args(args)


def measure(engine: LLMEngine, options: argparse.Namespace) -> tuple[list[float], float]:
    """Return the seconds of each decode step of one batch, and the all-reduces of a step."""
    params = SamplingParams(temperature=0.0, max_tokens=33, ignore_eos=True)
    for i in range(options.batch):
        engine.add_request(str(i), [3 + i % 32] * options.context, params)
    while any(seq.num_uncomputed_tokens > 1 for samples in engine.requests.values() for seq in samples):
        engine.step()
    seconds, before = [], engine.ranks.num_all_reduces
    while engine.has_unfinished_requests():
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    return seconds, (engine.ranks.num_all_reduces - before) / len(seconds)


def compare(options: argparse.Namespace) -> dict[str, dict[int, Any]]:
    """Let one rank and several take turns. Return each number by the number of ranks."""
    engines = {num_ranks: build(options, num_ranks) for num_ranks in (1, options.ranks)}
    times: dict[int, list[float]] = {num_ranks: [] for num_ranks in engines}
    counts = dict[int, float]()
    for _ in range(options.rounds):
        for num_ranks, engine in engines.items():
            seconds, counts[num_ranks] = measure(engine, options)
            times[num_ranks] += seconds
    result: dict[str, dict[int, Any]] = {
        "bytes of weights": {num_ranks: bytes_of_weights(engine) for num_ranks, engine in engines.items()},
        "bytes of KV cache per token": {n: engine.kv_cache.bytes_per_token for n, engine in engines.items()},
        "all-reduces a step": counts,
        "ms a step": {num_ranks: statistics.median(seconds) * 1000 for num_ranks, seconds in times.items()},
        "fastest": {num_ranks: min(seconds) * 1000 for num_ranks, seconds in times.items()},
    }
    for engine in engines.values():
        engine.ranks.close()
    return result


def bytes_of_weights(engine: LLMEngine) -> int:
    """Return the size of the weights that rank 0 holds."""
    assert isinstance(engine.executor, ModelRunner)
    return sum(weight.nbytes for weight in engine.executor.model.parameters())


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="models/storyteller")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args(argv)


if __name__ == "__main__":
    for name, numbers in compare(parse()).items():
        print(f"{name}: {shown(numbers)}")
