"""The time to the first token of a prompt whose beginning is cached, and of one that is new."""

import random
from functools import partial
from typing import Any

from ...llm import LLM
from ..compiling import compiled_llm
from .peer import Peer, load_peer
from .report import machine
from .throughput import numbers, serve_anew
from .timing import Run, serve
from .turns import ratio, take_turns
from .workload import Task, check_length, random_tokens


def measure(
    engine: dict[str, Any], rounds: int, peer: bool, prefix_len: int, input_len: int, output_len: int
) -> dict[str, Any]:
    llm = compiled_llm(engine | {"enable_prefix_caching": True})
    check_length(llm, prefix_len + input_len, output_len)
    rng = random.Random(0)
    beginning = random_tokens(llm, prefix_len, rng)
    task = Task(beginning + random_tokens(llm, input_len, rng), output_len)
    other = load_peer(llm) if peer else "transformers was not asked for"
    calls = {"new": partial(serve_anew, llm, [task]), "cached": partial(serve_cached, llm, task, beginning)}
    if isinstance(other, Peer):
        calls["transformers"] = partial(other.serve, [task])
    found = take_turns(calls, rounds, "prefix")
    measured = {name: figures([each[name] for each in found]) for name in calls}
    first = ratio(found, "new", "cached", lambda run: run.first_tokens[0])
    says = ["first token {median:.1f} times as soon ({least:.1f} to {largest:.1f})".format(**first)]
    settings = {"prefix_len": prefix_len, "input_len": input_len, "output_len": output_len, "rounds": rounds}
    return {
        "bench": "prefix",
        "settings": settings,
        "machine": machine(llm),
        "measured": measured,
        "sooner": first,
        "says": says + ([] if isinstance(other, Peer) else [other]),
    }


def serve_cached(llm: LLM, task: Task, beginning: list[int]) -> Run:
    """Another prompt with this beginning was served before."""
    assert llm.reset_prefix_cache(), "a request runs"
    serve(llm, [Task(beginning, 1)])
    return serve(llm, [task])


def figures(runs: list[Run]) -> dict[str, Any]:
    named = numbers(runs)
    return {name: named[name] for name in ("first_token_ms", "seconds")} | {"tokens_hit": runs[0].num_cached_tokens}
