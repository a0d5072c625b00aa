"""All requests at once: tokens a second, the time to the first token, and between two tokens."""

import statistics
from functools import partial
from typing import Any

from ...llm import LLM
from ..compiling import compiled_llm
from .floor import floor_seconds, read_bandwidth
from .peer import Peer, load_peer
from .report import machine
from .timing import Run, percentiles, serve
from .turns import median, ratio, take_turns
from .workload import Task, random_tasks, tasks_of_file

NOTE = "times in ms: p50 / p90 / p99 of all rounds"


def measure(
    engine: dict[str, Any],
    rounds: int,
    peer: bool,
    num_prompts: int,
    input_len: int,
    output_len: int,
    spread: float,
    prompts_file: str | None,
) -> dict[str, Any]:
    llm = compiled_llm(engine)
    if prompts_file:
        tasks = tasks_of_file(llm, prompts_file, output_len)
        settings: dict[str, Any] = {"prompts": prompts_file, "num_prompts": len(tasks), "output_len": output_len}
    else:
        tasks = random_tasks(llm, num_prompts, input_len, output_len, spread)
        settings = {"num_prompts": num_prompts, "input_len": input_len, "output_len": output_len, "spread": spread}
    return compare("throughput", llm, tasks, rounds, peer, settings)


def compare(
    name: str, llm: LLM, tasks: list[Task], rounds: int, peer: bool, settings: dict[str, Any]
) -> dict[str, Any]:
    """This engine and, if asked for, transformers serve the same tasks in turns."""
    other = load_peer(llm) if peer else "transformers was not asked for"
    calls = {"nanovllm": partial(serve_anew, llm, tasks)}
    if isinstance(other, Peer):
        calls["transformers"] = partial(other.serve, tasks)
    found = take_turns(calls, rounds, name)
    bandwidth = read_bandwidth(llm)
    floor = floor_seconds(llm, tasks, round(median(found, "nanovllm", lambda run: run.num_steps)), bandwidth)
    measured = {name: numbers([each[name] for each in found]) for name in calls}
    measured["nanovllm"]["floor_share"] = floor / measured["nanovllm"]["seconds"]
    says = [NOTE, f"floor: reading the weights once a step, and the KV cache, at {bandwidth / 1e9:.1f} GB/s"]
    result: dict[str, Any] = {}
    if isinstance(other, Peer):
        result["speedup"] = ratio(found, "transformers", "nanovllm", lambda run: run.seconds)
        says.append("nanovllm is {median:.2f} times as fast ({least:.2f} to {largest:.2f})".format(**result["speedup"]))
    else:
        says.append(other)
    settings = settings | {"rounds": rounds}
    return {"bench": name, "settings": settings, "machine": machine(llm), "measured": measured, **result, "says": says}


def serve_anew(llm: LLM, tasks: list[Task]) -> Run:
    """Nothing of an earlier round is found in the cache."""
    assert llm.reset_prefix_cache(), "a request runs"
    return serve(llm, tasks)


def numbers(runs: list[Run]) -> dict[str, Any]:
    """Medians of the rounds; of times, those of all rounds together."""
    seconds = statistics.median(run.seconds for run in runs)
    return {
        "tokens_per_second": runs[0].num_tokens / seconds,
        "seconds": seconds,
        "steps": runs[0].num_steps,
        "first_token_ms": percentiles([each for run in runs for each in run.first_tokens]),
        "between_tokens_ms": percentiles([each for run in runs for each in run.gaps]),
    }
