"""Stage 1: the gain of a cache, and how it fills a pool."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanovllm.bench.harness import Scores, ratios, timed
from stages.bench.counting import num_operations
from stages.bench.decode_step import Case, DecodeStep
from stages.bench.engines import silent
from stages.bench.replay import Admits, Moment, admitted, arrivals, replay
from stages.bench.steady import until_steady
from stages.bench.workloads import Traffic, traffic
from stages.s1_contiguous_cache.llama import ModelConfig
from stages.s1_contiguous_cache.slot_manager import SlotManager

POOL, LONGEST = 8192, 1024
START = 300  # the first step that counts: by then the traffic has filled the pool


def measure(model: Path) -> Scores:
    """Return the gain of the cache, the cost of more tokens, operations of three steps, and the seats of a pool.

    Without a cache a token costs as much as a prefill of the whole text.
    """
    cases = {f"prefill_{length}": (1, length, length) for length in (16, 990)}  # batch, context, computed tokens
    cases |= {f"decode_{length}": (1, length, 1) for length in (16, 990)}
    cases |= {"8_tokens": (1, 8, 8), "1_token": (1, 1, 1)}
    calls = {name: timed(step(model, *case)) for name, case in cases.items()}
    pairs = {f"cache_at_{place}": (f"prefill_{place}", f"decode_{place}") for place in (16, 990)}
    pairs |= {"cost_of_8_tokens": ("8_tokens", "1_token")}
    rounds, turns = until_steady(calls, lambda rounds: ratios(rounds, pairs))
    counts = {"operations": operations_of_a_step(model), "seats": num_seats(model), "turns": turns}
    return ratios(rounds, pairs) | counts


def operations_of_a_step(model: Path) -> dict[str, int]:
    """Return the operations that torch carries out for a token, for 8 tokens of one text, and for 8 sequences."""
    cases = {"1_token": (1, 64, 1), "8_tokens": (1, 8, 8), "8_sequences": (8, 64, 1)}
    return {name: num_operations(step(model, *case)) for name, case in cases.items()}


def step(model: Path, batch: int, context: int, count: int) -> Callable[[], object]:
    """Return a call that computes the last `count` tokens of each text."""
    return DecodeStep("s1", model, Case("storyteller", "float32", batch, context)).computing(count)


def num_seats(model: Path) -> int:
    """Return how many sequences SlotManager admits when each reserves max_model_len slots."""
    config = ModelConfig.from_folder(model)
    requests = arrivals("s1", config, [Traffic(1, 1, 1)] * POOL, config.max_position_embeddings)
    manager = SlotManager(POOL, "max_model_len", config.max_position_embeddings, silent("s1"))
    return admitted(manager, (seq for seq, _ in requests), SlotManager.can_allocate)


# ---- holes


def holes(model: Path) -> dict[str, float]:
    """Return how often first fit refuses a request although enough slots are free, in part 3 of the notebook.

    `refused` is the share of such steps; the other numbers describe the step with the most slots to spare.
    """
    moments = crowded_moments(model)
    worst = most_free(moments)
    slots = {"needed": worst.waiting.max_num_tokens, "free": num_free(worst), "largest_free": worst.report.largest_free}
    return slots | {"refused": sum(map(is_refused, moments)) / len(moments)}


def crowded_moments(model: Path, admits: Admits = SlotManager.can_allocate) -> list[Moment]:
    """Return the traffic's steps after the pool has filled up."""
    return moments_of("s1", in_slots(), model, admits)[START:]


def moments_of(name: str, manager: Any, model: Path, admits: Admits) -> list[Moment]:
    """Run the traffic through a manager of stage `name`. Return one moment per step."""
    requests = arrivals(name, ModelConfig.from_folder(model), traffic(1500, seed=1), LONGEST)
    return replay(manager, requests, 1500, admits)


def in_slots() -> SlotManager:
    """Return a pool in which each sequence has a piece of its own."""
    return SlotManager(POOL, "request", LONGEST, silent("s1"))


def most_free(moments: list[Moment]) -> Moment:
    """Return the moment at which a request is refused with the most slots to spare."""
    return max(filter(is_refused, moments), key=lambda moment: num_free(moment) - moment.waiting.max_num_tokens)


def is_refused(moment: Moment) -> bool:
    """Return whether the waiting request would fit if the free slots were contiguous."""
    return bool(num_free(moment) >= moment.waiting.max_num_tokens)


def num_free(moment: Moment) -> int:
    """Return the free slots."""
    return int(moment.report.num_slots - moment.report.held)
