"""The time to the first token of a prompt whose beginning is on the device, on the host, or computed again."""

import random
from functools import partial
from typing import Any

from ...engine.config import POOL_SIZES
from ...engine.cost_model import measure as measure_cost
from ...llm import LLM
from ..compiling import compiled_llm
from .prefix import figures, serve_cached
from .report import machine
from .throughput import serve_anew
from .timing import Run, serve
from .turns import ratio, take_turns
from .workload import Task, check_length, random_tokens

TIMES_ON_HOST = 4  # the host's pool, in pools of the device


def measure(
    engine: dict[str, Any], rounds: int, peer: bool, prefix_len: int, input_len: int, output_len: int
) -> dict[str, Any]:
    """transformers has no second tier: `peer` is of no use here."""
    length = prefix_len + input_len + output_len
    llm = compiled_llm(options(engine, length))
    check_length(llm, prefix_len + input_len, output_len)
    rng = random.Random(0)
    beginning, other = random_tokens(llm, prefix_len, rng), random_tokens(llm, length - output_len, rng)
    task = Task(beginning + random_tokens(llm, input_len, rng), output_len)
    calls = {
        "computed": partial(serve_anew, llm, [task]),
        "on the device": partial(serve_cached, llm, task, beginning),
        "on the host": partial(serve_from_host, llm, task, beginning, other),
    }
    parts = llm.llm_engine
    num_tokens = min(llm.config.max_num_batched_tokens, prefix_len + input_len)
    cost = measure_cost(parts.kv_cache, parts.executor, parts.input_processor, num_tokens)  # it overwrites the pool
    found = take_turns(calls, rounds, "offload")
    measured = {name: figures([each[name] for each in found]) for name in calls}
    for name in calls:
        measured[name]["blocks_loaded"] = found[0][name].num_blocks_loaded
    first = ratio(found, "computed", "on the host", lambda run: run.first_tokens[0])
    chosen = "load" if cost.prefers_load(llm.kv_cache.bytes_per_token) else "compute again"
    settings = {"prefix_len": prefix_len, "input_len": input_len, "output_len": output_len, "rounds": rounds}
    return {
        "bench": "offload",
        "settings": settings,
        "machine": machine(llm),
        "measured": measured,
        "sooner": first,
        "auto": chosen,
        "says": conclusions(measured, first, f"{cost}; the policy auto would {chosen}"),
    }


def conclusions(measured: dict[str, Any], first: dict[str, Any], policy: str) -> list[str]:
    says = [
        "from the host, the first token is {median:.2f} times as soon ({least:.2f} to {largest:.2f})".format(**first),
        f"measured when the engine starts: {policy}",
    ]
    if not measured["on the host"]["blocks_loaded"]:
        says.insert(0, "nothing went to the host: the pool has room for all of it, give a smaller --kv-cache-tokens")
    return says


def options(engine: dict[str, Any], length: int) -> dict[str, Any]:
    """The engine's, with a pool that two such prompts fill, and a host to which the older one goes."""
    pool = {} if any(engine[size] for size in POOL_SIZES) else {"kv_cache_tokens": length + 2 * engine["block_size"]}
    host = {"offload_policy": "load", "enable_prefix_caching": True}
    if engine["kv_offloading_tokens"] is None:
        host["kv_offloading_tokens"] = TIMES_ON_HOST * (length + 2 * engine["block_size"])
    return engine | pool | host


def serve_from_host(llm: LLM, task: Task, beginning: list[int], other: list[int]) -> Run:
    """The beginning was computed, and then another prompt took its blocks."""
    assert llm.reset_prefix_cache(), "a request runs"
    serve(llm, [Task(beginning, 1)])
    serve(llm, [Task(other, 1)])
    return serve(llm, [task])
