"""Shared blocks: the blocks they save (claim 12), the cost of a fork (13), hit rates (14), a cached prompt (15)."""

import random

from notebooks.helpers import s6, size
from notebooks.helpers.claims.findings import Finding, committed, finding, not_measured, on_gpu, spread, under
from stages.bench.engines import part, without_model
from stages.bench.locality import BLOCK_OF_70B
from stages.bench.models import STORYTELLER, storyteller_of
from stages.bench.texts import memory_pool, paged_attention


class RandomReader:
    """A source of random tokens instead of prose: only prefixes that are meant to be shared are equal."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def read(self, count: int) -> list[int]:
        return [self._rng.randrange(3, 4096) for _ in range(count)]


# ---- the blocks that sharing saves


def full_blocks_shared() -> tuple[int, int]:
    """Return the blocks of prompts of 660 and 500 tokens that share 500, with and without stage 6's sharing."""
    prompts = [[*range(3, 503), *range(1000, 1160)], [*range(3, 503)]]
    alone = sum(-(-len(prompt) // 16) for prompt in prompts)
    return alone - round(s6.shared_blocks(prompts, 16) * alone), alone


def finding_12(count: int = 20) -> Finding:
    traffic, example, (held, alone) = (
        s6.kinds(RandomReader(), count),
        memory_pool.share_a_prompt(),
        full_blocks_shared(),
    )
    prompts = {kind: [ask.tokens for ask in some] for kind, some in traffic.items() if kind != "multi-turn"}
    saved = {kind: (s6.shared_blocks(some[:2], 16), s6.shared_blocks(some, 16)) for kind, some in prompts.items()}
    return finding(
        12,
        holds_as_worded=max(a for a, _ in saved.values()) <= 0.5 and example.held == 42,
        example=f"{example.held} of {example.alone} blocks, {example.saved:.1%} fewer",
        full=f"{held} of {alone}, {1 - held / alone:.1%} fewer",
        count=count,
        saved=", ".join(f"{kind} {a:.0%} and {b:.0%}" for kind, (a, b) in saved.items()),
    )


def finding_13() -> Finding:
    names = ("fork_200_and_free", "copy_one", "copy_seven", "copy_one_of_70b")
    times = {name: committed(f"claims.fork.{name}").text("{:.1f}") for name in names}
    beams = under("predict.s5.beams") or {"blocks": 0, "alone": 0, "ratio": float("nan")}
    least = gpu = not_measured(0)
    if table := on_gpu(0, "The device"):
        speed = table.rows["device"]["copy GB/s, read and written"]
        least = f"{2 * BLOCK_OF_70B / speed / 1000:.1f} us at the {speed:,.0f} GB/s at which {table.machine} copies"
    gpu = not_measured(5)
    if (table := on_gpu(5, "Claim 13")) and "70B" in table.rows:
        gpu = f"{spread(table.rows['70B'], 'plain copy').text('{:.1f}')} us on {table.machine}"
    needed = 2 * BLOCK_OF_70B / 1.6e-6 / 1e12
    return finding(13, beams["ratio"] < 4, **times, beams=beams, needed=needed, least=least, gpu=gpu)


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
    own = paged_attention.Blocks(length // 16)
    own.allocate_cached(prompt)
    left = length - own.allocate_cached(prompt)[1]
    return finding(
        15,
        holds_as_worded=again.num_cached_tokens == length - 16 and left == 0,
        left=left,
        first=first.num_prompt_tokens - first.num_cached_tokens,
        again=again.num_prompt_tokens - again.num_cached_tokens,
        hits=again.num_cached_tokens // 16,
        blocks=length // 16,
        seconds=first.seconds,
        ms=1000 * again.seconds,
    )
