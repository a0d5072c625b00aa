"""This engine beside others on the same weights, in one run: each serves the same requests in turn."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from ...llm import LLM
from ..compiling import compiled_llm
from .agreement import agreement, as_sentence
from .answers import Answer, Job, Serve, serve_here
from .contexts import SHORT, measure_contexts
from .floor import kv_bytes, read_bandwidth, weight_bytes
from .peer_process import PeerProcess, PeerSpec, peer_specs
from .report import has_random_weights, machine
from .turns import ratio, take_turns
from .workload import check_length, mixed_tasks, random_tasks

HERE = "nanovllm"
DECODE_LENGTH, WARM_UP_TOKENS = 128, 8
LENGTHS = 512  # a peer's max_model_len is a multiple of it, or this engine's
MAX_IDLE_SHARE = 0.05  # of a core, while others compute


class Turn(NamedTuple):
    answer: Answer
    bandwidth: float  # bytes a second, read right before it


def measure(
    engine: dict[str, Any],
    rounds: int,
    peer: tuple[str, ...],
    transformers: bool,
    jobs: str,
    contexts: str,
    context_batch: int,
) -> dict[str, Any]:
    specs, lengths = peer_specs(peer, transformers), whole_numbers("--contexts", contexts)
    llm = compiled_llm(engine)
    found = compare(llm, specs, made_jobs(llm, jobs), rounds)
    found["settings"] = {"jobs": jobs, "rounds": rounds} | ({"contexts": contexts} if lengths else {})
    if lengths:
        del llm  # its pool goes before another comes
        found["measured"][HERE] |= measure_contexts(engine, rounds, lengths, context_batch)
        found["says"].append(f"a context's attention: {context_batch} of it, less the same step at {SHORT} tokens")
    return found


def whole_numbers(name: str, text: str) -> list[int]:
    """
    >>> whole_numbers("--contexts", "1000,8000")
    [1000, 8000]
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{name} {text!r}: give whole numbers of at least 1 with commas between them")
    return list(map(int, parts))


def made_jobs(llm: LLM, text: str) -> list[Job]:
    """`mixed`, and numbers of sequences that decode together."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    numbers = whole_numbers("--jobs", ",".join(name for name in names if name != "mixed"))
    made = [Job("mixed", mixed_tasks(llm), is_decode=False)] if "mixed" in names else []
    for count in numbers:
        name = f"{count} sequence{'s' * (count > 1)}"
        made.append(Job(name, random_tasks(llm, count, DECODE_LENGTH, DECODE_LENGTH), is_decode=True))
    for job in made:
        for task in job.tasks:
            check_length(llm, len(task.prompt), task.num_tokens)
    return made


def compare(llm: LLM, specs: list[PeerSpec], jobs: list[Job], rounds: int) -> dict[str, Any]:
    """All engines are loaded first; a job is served by one of them at a time."""
    engines: dict[str, Serve] = {HERE: partial(serve_here, llm)}
    versions, says = dict[str, str](), []
    with ExitStack() as stack:
        for spec in specs if jobs else []:
            process = PeerProcess(spec, settings_of_peer(llm, jobs))
            stack.callback(process.end)
            engines[spec.name], versions[spec.name] = process.serve, process.version
        measured: dict[str, dict[str, Any]] = {name: {} for name in engines}
        for job in jobs:
            found = race(llm, engines, job, rounds)
            for name in engines:
                measured[name] |= figures(llm, job, name, found)
            lines = [floor_in_words(llm, job, found), *agreements(llm, job, found[-1]), *busy_while_idle(found)]
            says += [f"{job.name}: {line}" for line in lines]
    return {"bench": "peers", "machine": machine(llm) | versions, "measured": measured, "says": says}


def settings_of_peer(llm: LLM, jobs: list[Job]) -> dict[str, Any]:
    """What each of them needs to serve the jobs, with as many seats as here.

    The length is rounded up: vLLM compiles anew for each other one, for about a minute.
    """
    longest = max(len(task.prompt) + task.num_tokens for job in jobs for task in job.tasks)
    longest = min(-(-longest // LENGTHS) * LENGTHS, llm.max_model_len)
    seats = llm.config.max_num_seqs
    named = machine(llm)
    return {
        "model": str(llm.config.model),
        "load_format": llm.config.load_format,
        "dtype": named["dtype"],
        "threads": named["threads"],
        "max_model_len": longest,
        "max_num_seqs": seats,
        "kv_cache_bytes": seats * longest * llm.kv_cache.bytes_per_token,
        "device": str(llm.llm_engine.device),
    }


def race(llm: LLM, engines: Mapping[str, Serve], job: Job, rounds: int) -> list[dict[str, Turn]]:
    for serve in engines.values():
        serve(job.shortened(WARM_UP_TOKENS))

    def turn(serve: Serve) -> Turn:
        return Turn(bandwidth=read_bandwidth(llm), answer=serve(job.tasks))

    calls: dict[str, Callable[[], Turn]] = {name: partial(turn, serve) for name, serve in engines.items()}
    return take_turns(calls, rounds, job.name, warm_ups=0)


def figures(llm: LLM, job: Job, name: str, found: list[dict[str, Turn]]) -> dict[str, Any]:
    """Medians of the rounds, with the least and the largest where a speed is told."""
    turns = [each[name] for each in found]
    num_bytes = job.num_steps * weight_bytes(llm) + kv_bytes(llm, job.tasks)
    floors = [num_bytes / bandwidth_of(each) for each in found]  # seconds
    shares = [floor / job.seconds(turn.answer) for floor, turn in zip(floors, turns, strict=True)]
    numbers: dict[str, Any] = {
        f"{job.name}: tokens per second": spread([job.speed(turn.answer) for turn in turns]),
        f"{job.name}: share of the floor": statistics.median(shares),
    }
    if job.is_decode:
        numbers[f"{job.name}: step ms"] = 1000 * statistics.median(turn.answer.step_seconds for turn in turns)
    if name != HERE:
        numbers[f"{job.name}: {HERE} is times as fast"] = ratio(found, HERE, name, lambda turn: job.speed(turn.answer))
    return numbers


def bandwidth_of(turns: Mapping[str, Turn]) -> float:
    """A round's: one read alone may fall into a slow moment, and then one engine would look near to its floor."""
    return statistics.median(turn.bandwidth for turn in turns.values())


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "largest": max(values)}


def floor_in_words(llm: LLM, job: Job, found: list[dict[str, Turn]]) -> str:
    bandwidth = statistics.median(map(bandwidth_of, found))
    weights, kv = weight_bytes(llm) / 1e9, kv_bytes(llm, job.tasks) / 1e9
    read = f"weights of {weights:.3g} GB and {kv:.3g} GB of keys and values"
    return f"the floor is {job.num_steps} steps that read {read}, at {bandwidth / 1e9:.1f} GB/s"


def agreements(llm: LLM, job: Job, last: dict[str, Turn]) -> Iterator[str]:
    if has_random_weights(llm):
        return  # each engine has its own
    for name, turn in last.items():
        if name != HERE:
            yield f"{name}: {as_sentence(agreement(llm, job.tasks, last[HERE].answer, turn.answer))}"


def busy_while_idle(found: list[dict[str, Turn]]) -> Iterator[str]:
    """Engines whose threads go on while another one computes: they slow it down."""
    for name in found[0]:
        used = sum(each[name].answer.idle_cpu_seconds for each in found)
        others = sum(turn.answer.seconds for each in found for other, turn in each.items() if other != name)
        if others and used > MAX_IDLE_SHARE * others:
            yield f"{name} used {used / others:.0%} of a core while others computed"
