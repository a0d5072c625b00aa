"""Stage 7: to load or to recompute (the offload table); a pool cut to a third; eight samples that leave the device."""

from pathlib import Path
from typing import Any

from stages.bench import offload
from stages.bench.engines import by_sample, without_model
from stages.bench.predict.common import Answer, Shown, serve, with_answers
from stages.bench.racing import sampling_params
from stages.bench.results import value
from stages.bench.workloads import Request, even_prompt

SHORT, LONG, BLOCK_SIZE = 16, 1024, 16  # tokens; tokens; slots
SAMPLES, PROMPT, OUTPUT = 8, 200, 40
POOL = 1024


def answers(model: Path) -> dict[str, Any]:
    moved = samples_that_leave(model)
    cut = {policy: offload.count_without_model(policy) for policy in ("s6", "load", "recompute")}
    numbers = {"cut": cut, "samples": moved}
    show = Shown("predict.s7", numbers)
    return with_answers(numbers, [about_cost(), about_the_pool(show), about_samples(show)])


def about_cost() -> Answer:
    first = value("offload.first_token")
    show = Shown("offload.first_token", first)
    few, many = (first[str(length)] for length in (SHORT, LONG))
    loaded, computed = ([1000 * each[f"{way}_seconds"] for each in (few, many)] for way in ("loaded", "computed"))
    return Answer(
        f"A prompt comes whose first {SHORT} tokens are on the host, or its first {LONG:,}; its last {offload.TAIL} "
        "are new. (A model of 135M parameters, on a CPU.) How much sooner does its first token come if their keys and "
        "values are loaded than if they are computed again, for each length?",
        f"{show(f'{SHORT}.ratio', '.1f')} times, and {show(f'{LONG}.ratio', '.0f')} times: {loaded[0]:.0f} ms in "
        f"place of {computed[0]:.0f} ms for {SHORT} tokens, {loaded[1]:.0f} ms in place of {computed[1]:,.0f} ms for "
        f"{LONG:,}. Either way there is a step for the new tokens, which reads all weights for however few there are. "
        "Beyond that both costs grow about linearly, so the winner is mostly a ratio of two speeds.",
    )


def about_the_pool(show: Shown) -> Answer:
    twice = [show(f"cut.{policy}.computed_twice", ",") for policy in ("s6", "load")]
    times = [show(f"cut.{policy}.preemptions") for policy in ("s6", "load")]
    return Answer(
        f"{offload.NUM_REQUESTS} requests have a pool of a third of what they hold in the end, and both stages have "
        "their prefix cache. How many tokens are computed twice in stage 6? And in stage 7, with a host pool four "
        "times as large?",
        f"{twice[0]}, and {twice[1]}. There are {times[0]} preemptions in stage 6, and {times[1]} in stage 7. A "
        "preempted sequence finds its full blocks again if they are still there: in stage 6 others have mostly taken "
        "them; in stage 7 these are on the host, and only a block that was not full is computed again.",
    )


def about_samples(show: Shown) -> Answer:
    entries, stored, shared, loaded = (show(f"samples.{name}") for name in ("entries", "stored", "shared", "loaded"))
    return Answer(
        f"Eight samples of one prompt of {PROMPT} tokens, with {OUTPUT} tokens each, leave the device, and the request "
        "comes again. How often does the prompt go to the host? How often does it come back?",
        f"Once, and once. Of {entries} entries in the eight tables {stored} full blocks are "
        f"different texts and go to the host: {shared} of the prompt, which all eight held, and their own. "
        f"{loaded} come back, before the request is forked again.",
    )


# ---- counted


def samples_that_leave(model: Path) -> dict[str, int]:
    """Serve a request of SAMPLES samples, fill the pool with another text, and serve the first again."""
    options = {"kv_cache_tokens": POOL, "block_size": BLOCK_SIZE, "kv_offloading_tokens": 4 * POOL}
    engine = without_model("s7", by_sample, model=str(model), offload_policy="load", **options)
    request = Request(even_prompt(PROMPT), OUTPUT, SAMPLES)
    engine.add_request("first", request.prompt_token_ids, sampling_params("s7", request))
    entries = 0
    while engine.has_unfinished_requests():
        entries = max(entries, sum(len(seq.block_table) for seq in engine.scheduler.running))
        engine.step()
    serve("s7", engine, "other", Request([9] * (POOL - 1), 1))
    tier = engine.host_tier
    stored, before = tier.num_blocks_stored, tier.num_blocks_loaded
    serve("s7", engine, "again", request)
    loaded = tier.num_blocks_loaded - before
    return {"entries": entries, "stored": stored, "shared": PROMPT // BLOCK_SIZE, "loaded": loaded}
