"""Shared blocks: the blocks they save (claim 12), the cost of a fork (13), hit rates (14), a cached prompt (15)."""

import random

from notebooks.helpers import s6, size
from notebooks.helpers.claims.findings import Finding, committed, finding, under
from stages.bench.engines import part, without_model
from stages.bench.models import STORYTELLER, storyteller_of


class RandomReader:
    """A source of random tokens instead of prose: only prefixes that are meant to be shared are equal."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def read(self, count: int) -> list[int]:
        return [self._rng.randrange(3, 4096) for _ in range(count)]


# ---- the blocks that sharing saves


def saved_by_two(tail: int, both: bool) -> float:
    """Return the share of blocks that two requests save if they share 500 tokens, and one or both have a tail."""
    shared = list(range(3, 503))
    tails = ([4000 + i % 90 for i in range(tail)], [3900 - i % 90 for i in range(tail)] if both else [])
    return s6.shared_blocks([shared + tails[0], shared + tails[1]], 16)


def finding_12(count: int = 20) -> Finding:
    tails = []
    for share in (0.43, 0.42):
        one, two = ([t for t in range(600) if round(saved_by_two(t, both), 2) == share] for both in (False, True))
        tails.append(f"{share:.0%} with {one[0]} to {one[-1]} tokens of one's own, or {two[0]} to {two[-1]} of each")
    traffic = s6.kinds(RandomReader(), count)
    prompts = {kind: [ask.tokens for ask in some] for kind, some in traffic.items() if kind != "multi-turn"}
    saved = {kind: (s6.shared_blocks(some[:2], 16), s6.shared_blocks(some, 16)) for kind, some in prompts.items()}
    shown = ", ".join(f"{kind} {a:.0%} and {b:.0%}" for kind, (a, b) in saved.items())
    return finding(12, max(a for a, _ in saved.values()) <= 0.5, tails="; ".join(tails), count=count, saved=shown)


def finding_13() -> Finding:
    names = ("fork_200_and_free", "copy_one", "copy_seven", "copy_one_of_70b")
    times = {name: committed(f"claims.fork.{name}").text("{:.1f}") for name in names}
    beams = under("predict.s5.beams") or {"blocks": 0, "alone": 0, "ratio": float("nan")}
    return finding(13, beams["ratio"] < 4, **times, beams=beams, needed=2 * 5.24e6 / 1.6e-6 / 1e12)


# ---- hits


def hit_rates(count: int) -> dict[str, float]:
    """Serve five kinds of traffic in stage 6 without a model, one request at a time."""
    rates = {}
    for kind, asks in s6.kinds(RandomReader(), count).items():
        engine = without_model("s6", model=str(STORYTELLER), dtype="float32", kv_cache_tokens=8192)
        rates[kind] = s6.hit_rate(s6.serve(engine, asks))
    return rates


def finding_14(count: int = 20) -> Finding:
    rates = hit_rates(count)  # in the order of the text, from the highest to none
    in_order = [*rates.values()] == sorted(rates.values(), reverse=True) and rates["unique"] == 0
    shown = ", ".join(f"{kind} {rate:.0%}" for kind, rate in rates.items())
    return finding(14, in_order, rates=shown, rest=2000 / 0.92 - 2000)


def finding_15() -> Finding:
    """Serve a prompt of 4,096 tokens twice. The weights are random, which changes no count and no time."""
    length = size(4096, 512)
    prompt, options = RandomReader().read(length), {"kv_cache_tokens": 2 * length, "max_num_batched_tokens": 512}
    engine = part("s6", "llm").LLM(storyteller_of(length + 64), dtype="float32", **options).llm_engine
    first, again = s6.serve(engine, [s6.Ask(0, prompt, 1), s6.Ask(1, prompt, 1)])
    return finding(
        15,
        holds_as_worded=again.num_cached_tokens == length - 16,
        first=first.num_prompt_tokens - first.num_cached_tokens,
        again=again.num_prompt_tokens - again.num_cached_tokens,
        hits=again.num_cached_tokens // 16,
        blocks=length // 16,
        seconds=first.seconds,
        ms=1000 * again.seconds,
    )
