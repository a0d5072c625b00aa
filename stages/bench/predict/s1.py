"""Stage 1: what a cache buys, and how it fills a pool."""

import itertools
from pathlib import Path
from typing import Any

from stages import s1_contiguous_cache as s1
from stages.bench.engines import silent
from stages.bench.harness import Spread
from stages.bench.predict.common import Answer, Shown, ratio_of, run, with_answers
from stages.bench.replay import Moment, admitted, arrivals, replay
from stages.bench.workloads import traffic
from stages.s1_contiguous_cache.input_processor import InputProcessor
from stages.s1_contiguous_cache.llama import ModelConfig
from stages.s1_contiguous_cache.slot_manager import SlotManager


def answers(model: Path) -> dict[str, Any]:
    llm = s1.LLM(model, dtype="float32")
    early, late = cache_gain(llm, 16), cache_gain(llm, 990)
    tokens = ratio_of(lambda: run("s1", llm, [8]).prefill, lambda: run("s1", llm, [1]).prefill, rounds=9)
    sequences = ratio_of(lambda: run("s1", llm, [64] * 8).decode, lambda: run("s1", llm, [64]).decode, rounds=5)
    gains = early.named("cache_at_16") | late.named("cache_at_990")
    costs = tokens.named("cost_of_8_tokens") | sequences.named("cost_of_8_sequences")
    numbers: dict[str, Any] = {**gains, **costs, "seats": seats_in(8192, llm)}
    show = Shown("predict.s1", numbers)
    entries = [
        Answer(
            "How much faster does the cache make the 16th token of a text? The 990th?",
            f"{show('cache_at_16', '.1f')} times, and {show('cache_at_990', '.0f')} times. Without a cache, token n "
            "costs a forward pass over n tokens.",
        ),
        Answer(
            "Feeding 8 tokens of one text costs how many times feeding 1? And a step for 8 sequences?",
            f"{show('cost_of_8_tokens', '.1f')} times, and {show('cost_of_8_sequences', '.1f')} times; not 8. Weights "
            "are read once either way: that is why engines batch. But each sequence has its own keys and values, and "
            "this stage attends to them in turn.",
        ),
        Answer(
            "How many sequences fit in 8,192 slots when each reserves 1,024?",
            f"{show('seats')}, whether they become texts of 1,000 tokens or of ten.",
        ),
    ]
    return with_answers(numbers, entries)


def holes(model: Path) -> dict[str, float]:
    """How first fit refuses a request although enough is free, in made-up traffic as in part 3 of the notebook.

    `refused` is the share of steps at which that is so; the rest describes the step with the most to spare.
    """
    moments = crowded_moments(model)
    worst = most_free(moments)
    return {
        "needed": worst.waiting.max_num_tokens,
        "free": num_free(worst),
        "largest_free": worst.report.largest_free,
        "refused": sum(is_refused(moment) for moment in moments) / len(moments),
    }


def crowded_moments(model: Path) -> list[Moment]:
    """The traffic's steps, but for the start, while the pool fills up."""
    pool, longest = 8192, 1024
    manager = SlotManager(pool, "request", longest, silent("s1"))
    asked = arrivals("s1", ModelConfig.from_folder(model), traffic(1500, seed=1), longest)
    return replay(manager, asked, 1500, SlotManager.can_allocate)[300:]


def most_free(moments: list[Moment]) -> Moment:
    """The moment at which a request is refused with the most to spare."""
    return max(filter(is_refused, moments), key=lambda moment: num_free(moment) - moment.waiting.max_num_tokens)


def is_refused(moment: Moment) -> bool:
    """Return True if enough is free for the request that waits: it lies in pieces, then."""
    return num_free(moment) >= moment.waiting.max_num_tokens


def num_free(moment: Moment) -> int:
    return moment.report.num_slots - moment.report.held


def seats_in(num_slots: int, llm: s1.LLM) -> int:
    """How many sequences SlotManager lets in when each reserves max_model_len slots."""
    inputs = InputProcessor(llm.model_config, None, llm.max_model_len, seed=0)
    manager = SlotManager(num_slots, "max_model_len", llm.max_model_len, silent("s1"))
    sequences = (inputs.process(str(number), [1], s1.SamplingParams()) for number in itertools.count())
    return admitted(manager, sequences, SlotManager.can_allocate)


def cache_gain(llm: s1.LLM, position: int) -> Spread:
    """Seconds for a token at `position` without a cache, over seconds with it, in five pairs.

    Without a cache the whole text is computed again: that is what a prefill of `position` tokens costs.
    """
    runs = [run("s1", llm, [position]) for _ in range(5)]
    return Spread.of([seconds.prefill / seconds.decode for seconds in runs])
