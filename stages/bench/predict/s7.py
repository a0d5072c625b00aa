"""Stage 7: what a load takes, and what recompute; a pool cut to a third; eight samples that leave the device."""

from pathlib import Path
from typing import Any

from stages.bench import offload
from stages.bench.engines import by_sample, engine_class, part
from stages.bench.harness import milliseconds
from stages.bench.models import storyteller_of
from stages.bench.predict.common import Answer, llm_of, serve, with_answers
from stages.bench.racing import sampling_params
from stages.bench.workloads import Request, even_prompt

SHORT, LONG, BLOCK_SIZE = 16, 1024, 16  # tokens; tokens; slots
SAMPLES, PROMPT, OUTPUT = 8, 200, 40
POOL = 1024


def answers(model: Path) -> dict[str, Any]:
    costs, moved = load_against_recompute(), samples_that_leave(model)
    cut = {policy: offload.count_without_model(policy) for policy in ("s6", "load", "recompute")}
    entries = [about_cost(costs), about_the_pool(cut), about_samples(moved)]
    return with_answers({"costs": costs, "cut": cut, "samples": moved}, entries)


def about_cost(costs: dict[str, float]) -> Answer:
    times = [costs[f"{name}_{length}_ms"] for length in (SHORT, LONG) for name in ("load", "recompute")]
    few, many = (costs[f"recompute_{n}_ms"] / costs[f"load_{n}_ms"] for n in (SHORT, LONG))
    return Answer(
        f"A prompt's first {SHORT} tokens are on the host, or its first {LONG:,}, in float32 on a CPU. What takes "
        "longer: to load their keys and values, or to compute them again? By how much, for each length?",
        f"To compute them: {times[1]:.1f} ms against {times[0]:.2f} ms for {SHORT} tokens, {few:.0f} times as long; "
        f"{times[3]:,.0f} ms against {times[2]:.1f} ms for {LONG:,}, {many:.0f} times. Both grow about linearly, so "
        "the winner is mostly a ratio of two speeds. Length matters where one of them has a fixed cost: a step reads "
        "all weights for however few tokens.",
    )


def about_the_pool(cut: dict[str, dict[str, int]]) -> Answer:
    s6, load = cut["s6"], cut["load"]
    return Answer(
        f"{offload.NUM_REQUESTS} requests have a pool of a third of what they hold in the end, and both stages have "
        "their prefix cache. How many tokens are computed twice in stage 6? And in stage 7, with a host pool four "
        "times as large?",
        f"{s6['computed_twice']:,}, and {load['computed_twice']:,}. There are {s6['preemptions']} preemptions in stage "
        f"6, and {load['preemptions']} in stage 7. A preempted sequence finds its full blocks again if they are still "
        "there: in stage 6 others have mostly taken them; in stage 7 these are on the host, and only a block that was "
        "not full is computed again.",
    )


def about_samples(moved: dict[str, int]) -> Answer:
    return Answer(
        f"Eight samples of one prompt of {PROMPT} tokens, with {OUTPUT} tokens each, leave the device, and the request "
        "comes again. How often does the prompt go to the host? How often does it come back?",
        f"Once, and once. Of {moved['entries']} entries in the eight tables {moved['stored']} full blocks are "
        f"different texts and go to the host: {moved['shared']} of the prompt, which all eight held, and their own. "
        f"{moved['loaded']} come back, before the request is forked again.",
    )


# ---- measured


def load_against_recompute() -> dict[str, float]:
    """Milliseconds for both ways and both lengths, medians: storyteller's shape, random weights, more positions."""
    options: dict[str, Any] = {"offload_policy": "load", "kv_offloading_tokens": LONG, "block_size": BLOCK_SIZE}
    sizes = {"kv_cache_tokens": 2 * LONG, "max_num_batched_tokens": LONG}
    engine = llm_of("s7", storyteller_of(2 * LONG), **sizes, **options).llm_engine
    calls = {}
    for length in (SHORT, LONG):
        calls[f"load_{length}_ms"] = lambda length=length: load(engine, length // BLOCK_SIZE)
        calls[f"recompute_{length}_ms"] = lambda length=length: prefill(engine, length)
    return milliseconds(calls)


def load(engine: Any, num_blocks: int) -> None:
    """From the host to the device, and wait."""
    copies = [part("s7", "kv_cache").BlockCopy(block, block) for block in range(num_blocks)]
    engine.host_kv_cache.load(copies).wait()


def prefill(engine: Any, num_tokens: int) -> None:
    """In one step, as if nothing of it had been computed."""
    engine.kv_cache_manager.reset_prefix_cache()
    serve("s7", engine, "0", Request(even_prompt(num_tokens), 1))


# ---- counted


def samples_that_leave(model: Path) -> dict[str, int]:
    """Serve a request of SAMPLES samples, fill the pool with another text, and serve the first again."""
    options = {"kv_cache_tokens": POOL, "block_size": BLOCK_SIZE, "kv_offloading_tokens": 4 * POOL}
    engine = engine_class("s7")(by_sample, model=str(model), offload_policy="load", **options)
    request = Request(even_prompt(PROMPT), OUTPUT, SAMPLES)
    engine.add_request("first", request.prompt_token_ids, sampling_params("s7", request))
    entries = 0
    while engine.has_unfinished_requests():
        entries = max(entries, sum(len(seq.block_table) for seq in engine.scheduler.running))
        engine.step()
    serve("s7", engine, "other", Request([9] * (POOL - 1), 1))
    host = engine.host_kv_cache
    stored, before = host.num_blocks_stored, host.num_blocks_loaded
    serve("s7", engine, "again", request)
    loaded = host.num_blocks_loaded - before
    return {"entries": entries, "stored": stored, "shared": PROMPT // BLOCK_SIZE, "loaded": loaded}
