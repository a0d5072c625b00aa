"""Shared blocks: the blocks they save (claim 12), the cost of a fork (13), hit rates (14), a cached prompt (15)."""

import random

from notebooks.helpers import s6, size
from notebooks.helpers.claims.findings import Finding, Rows, finding, of_gpu, spread, under
from stages.bench.engines import part, without_model
from stages.bench.locality import BLOCK_OF_70B
from stages.bench.models import STORYTELLER, storyteller_of
from stages.bench.texts import memory_pool, paged_attention


class RandomReader:
    """A source of random tokens instead of prose: only prefixes that are meant to be shared are equal."""

    def __init__(self) -> None:
        self._rng = random.Random(0)

    def read(self, count: int) -> list[int]:
        return [self._rng.randrange(3, 4096) for _ in range(count)]


def finding_12(count: int = 20) -> Finding:
    prompts = [[*range(3, 503), *range(1000, 1160)], [*range(3, 503)]]  # 660 and 500 tokens share 500
    alone = sum(-(-len(prompt) // 16) for prompt in prompts)
    held = alone - round(s6.shared_blocks(prompts, 16) * alone)
    in_example, of_example, _, _ = memory_pool.share_a_prompt()
    saved = dict[str, tuple[float, float]]()
    for kind, asks in s6.kinds(RandomReader(), count).items():
        if kind != "multi-turn":
            saved[kind] = tuple(s6.shared_blocks([ask.tokens for ask in some], 16) for some in (asks[:2], asks))
    return finding(
        12,
        holds_as_worded=max(two for two, _ in saved.values()) <= 0.5 and in_example == 42,
        example=f"{in_example} of {of_example} blocks, {1 - in_example / of_example:.1%} fewer",
        full=f"{held} of {alone}, {1 - held / alone:.1%} fewer",
        count=count,
        saved=", ".join(f"{kind} {two:.0%} and {all_of_them:.0%}" for kind, (two, all_of_them) in saved.items()),
    )


def finding_13() -> Finding:
    def least(machine: str, rows: Rows) -> str:
        speed = rows["device"]["copy GB/s, read and written"]
        return f"{2 * BLOCK_OF_70B / speed / 1000:.1f} us at the {speed:,.0f} GB/s at which {machine} copies"

    story = under("beams.story")
    beams = {"alone": story["alone"]["blocks"], "blocks": story["beams"]["blocks"], "ratio": story["times"]}
    return finding(
        13,
        holds_as_worded=beams["ratio"] < 4,
        beams=beams,
        needed=2 * BLOCK_OF_70B / 1.6e-6 / 1e12,
        least=of_gpu(0, "The device", least),
        gpu=of_gpu(5, "Claim 13", lambda gpu, rows: f"{spread(rows['70B'], 'plain copy'):.1f} us on {gpu}"),
    )


def finding_14(count: int = 20) -> Finding:
    """Serve five kinds of traffic in stage 6 without a model, one request at a time."""
    rates = {}  # in the order of the text, from the highest to none
    for kind, asks in s6.kinds(RandomReader(), count).items():
        engine = without_model("s6", model=str(STORYTELLER), dtype="float32", kv_cache_tokens=8192)
        rates[kind] = s6.hit_rate(s6.serve(engine, asks))
    in_order = [*rates.values()] == sorted(rates.values(), reverse=True) and rates["unique"] == 0
    shown = ", ".join(f"{kind} {rate:.0%}" for kind, rate in rates.items())
    return finding(14, in_order, rates=shown, rest=2000 / 0.92 - 2000)


def finding_15() -> Finding:
    """Serve a prompt of 4,096 tokens twice. The weights are random, which changes no count and no time."""
    length = size(4096, 512)
    prompt, options = RandomReader().read(length), {"kv_cache_tokens": 2 * length, "max_num_batched_tokens": 512}
    engine = part("s6", "llm").LLM(storyteller_of(length + 64), dtype="float32", **options).llm_engine
    first, again = s6.serve(engine, [s6.Ask(0, prompt, 1), s6.Ask(1, prompt, 1)])
    left = length - paged_attention.hits_of_second(prompt)
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
