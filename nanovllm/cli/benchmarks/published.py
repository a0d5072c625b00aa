"""nano-vllm's published workload: this engine beside transformers' continuous batching, one round each.

256 prompts of 100 to 1,024 random tokens, and as many tokens of each output: 142,827 in, 133,966 out.
"""

import sys
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch

from ...checkpoints.sizes import kv_bytes_per_token
from ...log import tell
from ..compiling import compiled_llm
from .answers import Answer, serve_here
from .floor import device_bandwidth
from .peer_process import PeerProcess, PeerSpec
from .published_load import Load, make_load, warm_up
from .report import machine
from .timing import percentiles
from .workload import Task

HERE, PEER = "nanovllm", "generate_batch"


def measure(
    engine: dict[str, Any],
    peer: bool,
    peer_seconds: float,
    num_requests: int,
    min_len: int,
    max_len: int,
    temperature: float,
) -> dict[str, Any]:
    load = make_load(engine, num_requests, min_len, max_len, temperature)
    answers, versions, says = dict[str, Answer](), dict[str, str](), list[str]()
    if peer:
        try:
            answers[PEER], versions[PEER] = serve_by_peer(load, engine.get("load_format", "auto"), peer_seconds)
            tell(f"{PEER}: {answers[PEER].tokens_per_second:,.1f} tokens a second")  # minutes of work, whatever comes
        except ValueError as error:  # the engine is measured all the same
            says.append(f"{PEER}: {error}")
    bandwidth = bandwidth_of(load.config.torch_device())
    llm = compiled_llm(engine | {"max_model_len": load.config.max_model_len})
    serve_here(llm, warm_up(load.tasks))
    answers = {HERE: serve_here(llm, load.tasks)} | answers
    measured = {name: figures(load, answer, bandwidth) for name, answer in answers.items()}
    if PEER in answers:
        ratio = answers[HERE].tokens_per_second / answers[PEER].tokens_per_second
        measured[PEER][f"{HERE} is times as fast"] = ratio
        says += cut_in_words(load.tasks, answers[PEER])
    num_prompt_tokens = sum(len(task.prompt) for task in load.tasks)
    settings = {"num_requests": num_requests, "lengths": f"{min_len} to {max_len}", "temperature": temperature}
    return {
        "bench": "published",
        "settings": settings | {"prompt_tokens": num_prompt_tokens},
        "machine": machine(llm) | versions,
        "measured": measured,
        "says": [*says, *in_words(bandwidth)],
    }


def serve_by_peer(load: Load, load_format: str, max_seconds: float) -> tuple[Answer, str]:
    """Its answer and its version. Its process has ended then: the engine finds the whole memory."""
    if find_spec("transformers") is None:
        raise ValueError("transformers is not installed")
    settings = settings_of_peer(load) | {"load_format": load_format, "max_seconds": max_seconds}
    process = PeerProcess(PeerSpec("transformers-batch", sys.executable), settings)
    try:
        process.serve(warm_up(load.tasks), may_be_cut=True)
        answer = process.serve(load.tasks, may_be_cut=True)
    finally:
        process.end()
    if not any(answer.tokens):
        raise ValueError(f"no token came within {max_seconds:g} seconds")
    return answer, process.version


def settings_of_peer(load: Load) -> dict[str, Any]:
    config, longest = load.config, max(len(task.prompt) + task.num_tokens for task in load.tasks)
    seats = min(config.max_num_seqs, len(load.tasks))
    return {
        "model": config.model,
        "dtype": str(load.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "max_model_len": config.max_model_len,
        "max_num_seqs": seats,
        "kv_cache_bytes": seats * longest * kv_bytes_per_token(load.model, load.dtype.itemsize),  # on a CPU
        "device": str(config.torch_device()),
        "temperature": load.tasks[0].temperature,
    }


def bandwidth_of(device: torch.device) -> float:
    """Before the engine comes: its pool leaves little room on a GPU."""
    found = device_bandwidth(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the pool takes what is free
    return found


def figures(load: Load, answer: Answer, bandwidth: float) -> dict[str, Any]:
    gaps = [after - before for each in answer.times for before, after in pairwise(each)]
    return {
        "tokens_per_second": answer.tokens_per_second,
        "seconds": answer.seconds,
        "tokens": sum(map(len, answer.tokens)),
        "share of the floor": load.floor_bytes(answer) / bandwidth / answer.seconds,
        "first_token_ms": percentiles([each[0] for each in answer.times if each]),
        "between_tokens_ms": percentiles(gaps),
    }


def cut_in_words(tasks: list[Task], answer: Answer) -> list[str]:
    made, asked = sum(map(len, answer.tokens)), sum(task.num_tokens for task in tasks)
    if made == asked:
        return []
    return [f"{PEER} was stopped after {answer.seconds:.0f} seconds, with {made:,} of {asked:,} tokens"]


def in_words(bandwidth: float) -> list[str]:
    return [
        "tokens: those of outputs; times in ms: p50 / p90 / p99; all requests come at once",
        f"floor: reading the weights once a step, and the KV cache, at {bandwidth / 1e9:.1f} GB/s",
    ]
