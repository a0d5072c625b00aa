"""Stage 1: what a cache buys, and how it fills a pool."""

import itertools
from pathlib import Path
from typing import Any

from stages import s1_contiguous_cache as s1
from stages.bench.harness import Spread
from stages.bench.predict.common import Answer, ratio_of, run, with_answers
from stages.bench.replay import admitted, arrivals, replay
from stages.bench.workloads import traffic
from stages.s1_contiguous_cache.input_processor import InputProcessor
from stages.s1_contiguous_cache.llama import ModelConfig
from stages.s1_contiguous_cache.slot_manager import SlotManager


def answers(model: Path) -> dict[str, Any]:
    llm = s1.LLM(model, dtype="float32")
    early, late = cache_gain(llm, 16), cache_gain(llm, 990)
    tokens = ratio_of(lambda: run("s1", llm, [8]).prefill, lambda: run("s1", llm, [1]).prefill, rounds=9)
    sequences = ratio_of(lambda: run("s1", llm, [64] * 8).decode, lambda: run("s1", llm, [64]).decode, rounds=5)
    seats = seats_in(8192, llm)
    entries = [
        Answer(
            "How much faster does the cache make the 16th token of a text? The 990th?",
            f"{early.ratio:.1f} times, and {late.ratio:.0f} times. Without a cache, token n costs a forward pass over "
            "n tokens.",
        ),
        Answer(
            "Feeding 8 tokens of one text costs how many times feeding 1? And a step for 8 sequences?",
            f"{tokens.ratio:.1f} times, and {sequences.ratio:.1f} times; not 8. Weights are read once either way: that "
            "is why engines batch. But each sequence has its own keys and values, and this stage attends to them in "
            "turn.",
        ),
        Answer(
            "How many sequences fit in 8,192 slots when each reserves 1,024?",
            f"{seats}, whether they become texts of 1,000 tokens or of ten.",
        ),
    ]
    gains = early.named("cache_at_16") | late.named("cache_at_990")
    costs = tokens.named("cost_of_8_tokens") | sequences.named("cost_of_8_sequences")
    return with_answers(gains | costs, entries)


def holes(model: Path) -> dict[str, float]:
    """How first fit refuses a request although enough is free, in made-up traffic as in part 3 of the notebook.

    `refused` is the share of steps at which that is so; the rest describes the step with the most to spare.
    """
    pool, longest = 8192, 1024
    manager = SlotManager(pool, "request", longest)
    asked = arrivals("s1", ModelConfig.from_folder(model), traffic(1500, seed=1), longest)
    moments = replay(manager, asked, num_steps=1500)[300:]  # not the start, while the pool fills up
    refused = [m for m in moments if pool - m.report.held >= m.waiting.max_num_tokens]
    worst = max(refused, key=lambda m: pool - m.report.held - m.waiting.max_num_tokens)
    return {
        "needed": worst.waiting.max_num_tokens,
        "free": pool - worst.report.held,
        "largest_free": worst.report.largest_free,
        "refused": len(refused) / len(moments),
    }


def seats_in(num_slots: int, llm: s1.LLM) -> int:
    """How many sequences SlotManager lets in when each reserves max_model_len slots."""
    inputs = InputProcessor(llm.model_config, None, llm.max_model_len, seed=0)
    manager = SlotManager(num_slots, "max_model_len", llm.max_model_len)
    sequences = (inputs.process(str(number), [1], s1.SamplingParams()) for number in itertools.count())
    return admitted(manager, sequences, SlotManager.can_allocate)


def cache_gain(llm: s1.LLM, position: int) -> Spread:
    """Seconds for a token at `position` without a cache, over seconds with it, in five pairs.

    Without a cache the whole text is computed again: that is what a prefill of `position` tokens costs.
    """
    runs = [run("s1", llm, [position]) for _ in range(5)]
    return Spread.of([seconds.prefill / seconds.decode for seconds in runs])
