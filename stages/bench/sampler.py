"""Sampling at a real vocabulary: 32 rows of 128,256 logits, against argmax and log_softmax of the same logits.

Each way to sample takes turns with these two. Logits are peaked, as those of trained models are, or flat, where nearly
every token can be drawn; each on one thread and on two.
"""

import itertools
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stages.bench.harness import ratio, take_turns, timed, with_spreads
from stages.s1_contiguous_cache.sampling import SamplingParams, SamplingRow, sample

NUM_ROWS, VOCAB_SIZE, ROUNDS = 32, 128_256, 15
THREADS = (1, 2)
WAYS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_k": SamplingParams(temperature=0.8, top_k=50),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95),
    "top_k_top_p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
}


def measure(args: Namespace) -> dict[str, Any]:
    """Of each way the milliseconds, and how many times as long as argmax and log_softmax it takes. Half a minute."""
    found: dict[str, Any] = {}
    num_threads = torch.get_num_threads()
    try:
        for threads, (name, logits) in itertools.product(THREADS, {"peaked": peaked(), "flat": flat()}.items()):
            torch.set_num_threads(threads)
            found[f"{name}_{threads}"] = measure_ways(logits)
    finally:
        torch.set_num_threads(num_threads)
    return {"sampler": found}


@torch.inference_mode()
def measure_ways(logits: Tensor, rounds: int = ROUNDS) -> dict[str, dict[str, float]]:
    """logits [num_rows, vocab_size]"""
    positions = itertools.count()

    def sample_in(way: str) -> None:
        position = next(positions)
        sample(logits, [SamplingRow(WAYS[way], seed, 0, position) for seed in range(len(logits))])

    calls: dict[str, Callable[[], object]] = {way: partial(sample_in, way) for way in WAYS}
    calls["two"] = lambda: (logits.argmax(dim=-1), logits.log_softmax(dim=-1))
    times = take_turns({name: timed(call) for name, call in calls.items()}, rounds, warm_ups=2)
    return {
        name: {**with_spreads([{"ms": 1000 * each[name]} for each in times]), **ratio(times, name, "two")._asdict()}
        for name in WAYS
    }


def flat(num_rows: int = NUM_ROWS) -> Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))


def peaked(num_rows: int = NUM_ROWS, num_likely: int = 200) -> Tensor:
    """A few tokens of each row stand out by 4 to 16, anywhere in the vocabulary."""
    generator = torch.Generator().manual_seed(1)
    likely = torch.rand(num_rows, VOCAB_SIZE, generator=generator).topk(num_likely).indices  # [num_rows, num_likely]
    gains = torch.linspace(16, 4, num_likely).expand(num_rows, -1)
    return 2 * flat(num_rows).scatter_add_(1, likely, gains / 2)
