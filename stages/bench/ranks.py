"""Tensor parallelism, measured by `python -m stages.bench.ranks [MODEL] [--ranks 2] [--device cpu]`.

One rank and several serve the same batch in turns, in one process. It prints what each rank holds, how many all-reduces
a decode step has, and the median time of a step.
"""

import argparse
import statistics
import time

import torch

from nanovllm.backends.torch.model_runner import ModelRunner
from nanovllm.engine.config import EngineArgs
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sampling_params import SamplingParams

ROUNDS = 5


def build(options: argparse.Namespace, num_ranks: int) -> LLMEngine:
    """Return an engine whose batch decodes in every step. Both use plain operations, so that they compare."""
    args = EngineArgs(
        options.model,
        device=options.device,
        dtype=options.dtype,
        load_format=options.load_format,
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


def main() -> None:
    """Print a line for one rank, and one for several."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="models/storyteller")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    options = parser.parse_args()
    engines = [build(options, num_ranks) for num_ranks in (1, options.ranks)]
    times: list[list[float]] = [[], []]
    counts = [0.0, 0.0]
    for _ in range(ROUNDS):
        for i, engine in enumerate(engines):
            seconds, counts[i] = measure(engine, options)
            times[i] += seconds
    for engine, seconds, count in zip(engines, times, counts, strict=True):
        assert isinstance(engine.executor, ModelRunner)
        weights = sum(weight.nbytes for weight in engine.executor.model.parameters())
        print(
            f"{engine.ranks.world_size} rank(s): {weights:,} bytes of weights and "
            f"{engine.kv_cache.bytes_per_token:,} bytes of KV cache per token on each, {count:g} all-reduces a step, "
            f"{statistics.median(seconds) * 1000:.2f} ms a step (fastest {min(seconds) * 1000:.2f})"
        )
        engine.ranks.close()


if __name__ == "__main__":
    main()
