"""Shared blocks: how much they save (claim 12), what a fork costs (13), hit rates (14), a cached prompt (15)."""

import random
from typing import NamedTuple

from notebooks.helpers import s6, size
from notebooks.helpers.claims.table import BLOG, POINTER, SLABS, Finding, committed, under
from stages.bench.engines import without_model
from stages.bench.models import STORYTELLER

CLAIMED = {"system prompt": 0.92, "multi-turn": 0.78, "retrieval": 0.65, "few-shot": 0.55, "unique": 0.05}
BLOCK = 16


class RandomReader:
    """Random tokens in place of prose: nothing begins alike but what is meant to."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def read(self, count: int) -> list[int]:
        return [self._rng.randrange(3, 4096) for _ in range(count)]


def engine(pool: int = 8192) -> object:
    return without_model("s6", model=str(STORYTELLER), dtype="float32", kv_cache_tokens=pool)


# ---- what sharing saves


def saved_of_two(tail: int, both: bool) -> float:
    """Of the blocks of two requests that share 500 tokens; one of them or both go on with `tail` of their own."""
    shared = list(range(3, 503))
    tails = ([4000 + i % 90 for i in range(tail)], [3900 - i % 90 for i in range(tail)] if both else [])
    return s6.shared_blocks([shared + tails[0], shared + tails[1]], BLOCK)


def finding_12(count: int = 20) -> Finding:
    fitting = {both: [t for t in range(600) if round(saved_of_two(t, both), 2) == 0.43] for both in (False, True)}
    asks = s6.kinds(RandomReader(), count)
    prompts = {kind: [ask.tokens for ask in some] for kind, some in asks.items() if kind != "multi-turn"}
    saved = {kind: (s6.shared_blocks(some[:2], BLOCK), s6.shared_blocks(some, BLOCK)) for kind, some in prompts.items()}
    one, two = (f"{fits[0]} to {fits[-1]}" if fits else "no number of" for fits in fitting.values())
    return Finding(
        12,
        "sharing a 500-token prompt between two requests saves 43% of the blocks; common prefixes save 50-80%",
        (SLABS,),
        "block by block: two that share 500 tokens and then one, or both, go on; four kinds of traffic, two and "
        f"{count} prompts at a time",
        f"43% where one of the two has {one} tokens of its own, or both have {two}; "
        + ", ".join(f"{kind} {a:.0%} and {b:.0%}" for kind, (a, b) in saved.items()),
        "43% holds for such a tail, and two can save at most half; 50-80% needs many at a time with a long common part",
    )


def finding_13() -> Finding:
    fork, one, seven, large = (
        committed(f"claims.fork.{name}") for name in ("fork_200_and_free", "copy_one", "copy_seven", "copy_one_of_70b")
    )
    beams = under("predict.s5.beams") or {}
    times = beams.get("ratio", float("nan"))
    return Finding(
        13,
        "a fork copies no data; copying one block costs 1.6 us on the device; a beam width of 4 takes up to 4x the "
        "blocks",
        (POINTER,),
        "a fork of 200 tokens, given back, and copies of blocks, timed in turns on the CPU; a beam search of width 4 "
        "counted",
        f"fork {fork.text('{:.1f}')} us, a block of 131 KB {one.text('{:.0f}')} us, seven {seven.text('{:.0f}')} us, "
        "a block "
        f"of 5.24 MB {large.text('{:.0f}')} us; {beams.get('blocks')} blocks in place of {beams.get('alone')}: "
        f"{times:.1f} "
        "times",
        "the fork holds; 4x is a bound, far from what is used; 1.6 us is a GPU's: make gpu PART=5. (To read and "
        f"write 5.24 MB in 1.6 us would be {2 * 5.24e6 / 1.6e-6 / 1e12:.1f} TB/s; an H200 copies at 4.3.)",
    )


# ---- hits


class Rate(NamedTuple):
    hit_rate: float
    mean_prompt: float
    claimed: float

    @property
    def rest_for_claim(self) -> float:
        """Tokens of a prompt that are not found, if the tokens found stay as many and the claim is right."""
        found = self.hit_rate * self.mean_prompt
        return found / self.claimed - found


def hit_rates(count: int) -> dict[str, Rate]:
    """Five kinds of traffic, one request at a time, in stage 6 without a model."""
    found = {}
    for kind, asks in s6.kinds(RandomReader(), count).items():
        served = s6.serve(engine(), asks)
        mean = sum(one.num_prompt_tokens for one in served) / len(served)
        found[kind] = Rate(s6.hit_rate(served), mean, CLAIMED[kind])
    return found


def rates_table(rates: dict[str, Rate]) -> str:
    rows = "".join(
        f"| {kind} | {r.mean_prompt:.0f} | {r.hit_rate:.0%} | {r.claimed:.0%} | "
        f"{(1 - r.hit_rate) * r.mean_prompt:.0f} | "
        f"{f'{r.rest_for_claim:.0f}' if r.hit_rate else 'none can be'} |\n"
        for kind, r in rates.items()
    )
    return (
        "| traffic | tokens a prompt | found | claimed | tokens that are not found | would be, if the claim held |\n"
        "|---|---|---|---|---|---|\n" + rows
    )


def finding_14(rates: dict[str, Rate]) -> Finding:
    return Finding(
        14,
        "hit rates: 92% with a shared system prompt of 2,000 tokens, 78% multi-turn, 65% retrieval, 55% few-shot, 5% "
        "unique "
        "prompts",
        (POINTER,),
        "traffic of the five kinds (a system prompt of 800 tokens, all else scaled alike), stage 6 without a model, "
        "counted",
        ", ".join(f"{kind} {rate.hit_rate:.0%}" for kind, rate in rates.items())
        + f"; 92% of a prompt that begins with 2,000 common tokens means {2000 / 0.92 - 2000:.0f} more on average",
        "the order holds; each rate is a statement about how long the rest of a prompt is, which the text does not "
        "give; "
        "prompts with nothing in common find nothing, not 5%",
    )


def finding_15() -> Finding:
    length = size(4096, 512)
    folder_engine = without_model(
        "s6", model=str(STORYTELLER), dtype="float32", kv_cache_tokens=2 * length, max_model_len=1024
    )
    prompt = RandomReader().read(1008)
    served = s6.serve(folder_engine, [s6.Ask(0, prompt, 1), s6.Ask(1, prompt, 1)])
    first, again = (one.num_prompt_tokens - one.num_cached_tokens for one in served)
    shared = under("prefix_cache.shared") or {}
    return Finding(
        15,
        "a cached 4,096-token prompt of 256 blocks skips its prefill: time to first token falls accordingly",
        (BLOG,),
        f"the same prompt of {len(prompt):,} tokens twice, counted; the time to first token from the prefix cache's "
        "table",
        f"{first:,} tokens are computed, then {again}; of 256 full blocks 255 would be found. Prompts that share "
        "most: the "
        f"median first token comes {shared.get('times_shorter', float('nan')):.1f} times as soon",
        "holds, but for the last block: its last token must go through the model, for its logits are what is asked for",
    )
