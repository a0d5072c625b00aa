"""nano-vllm's published workload: this engine beside transformers' continuous batching, one round each.

256 prompts of 100 to 1,024 random tokens, and as many tokens of each output: 142,827 in, 133,966 out.
"""

import random
import sys
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ...api.engine_args import EngineArgs
from ...checkpoints.sizes import kv_bytes_per_token
from ...core.block_manager import cdiv
from ...core.config import EngineConfig
from ...core.llama import ModelConfig
from ..compiling import compiled_llm
from ..streams import tell
from .answers import Answer, serve_here
from .floor import device_bandwidth, slots_read, weights_read
from .peer_process import PeerProcess, PeerSpec
from .report import machine
from .timing import percentiles
from .workload import Task

HERE, PEER = "nanovllm", "generate_batch"
LAST_ID = 10_000  # of a prompt's tokens; a smaller vocabulary has fewer
MAX_MODEL_LEN = 4096  # as that benchmark has it
WARM_UP_TOKENS = 8


class Load(NamedTuple):
    """What is served, and by what."""

    config: EngineConfig
    model: ModelConfig
    tasks: list[Task]

    @property
    def dtype(self) -> torch.dtype:
        return self.config.torch_dtype(self.model.dtype)

    def floor_bytes(self, answer: Answer) -> int:
        """What was to be read at least: the weights once a step, and the keys and values before each token.

        Computing the prompts is left out: on a GPU it is a small part.
        """
        made = [Task(task.prompt, len(tokens)) for task, tokens in zip(self.tasks, answer.tokens, strict=True)]
        lengths = [task.num_tokens for task in made]
        num_steps = max(max(lengths), cdiv(sum(lengths), self.config.max_num_seqs))
        itemsize = self.dtype.itemsize
        weights, slots = weights_read(self.model) * itemsize, slots_read(made)
        return num_steps * weights + slots * kv_bytes_per_token(self.model, itemsize)


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
        speeds = [measured[name]["tokens_per_second"] for name in (HERE, PEER)]
        measured[PEER][f"{HERE} is times as fast"] = speeds[0] / speeds[1]
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


def make_load(engine: dict[str, Any], num_requests: int, min_len: int, max_len: int, temperature: float) -> Load:
    """Raises ValueError if the model has too few positions."""
    if min_len > max_len:
        raise ValueError(f"--min-len {min_len} is above --max-len {max_len}")
    config = EngineArgs(**engine).engine_config()
    model = ModelConfig.from_folder(config.model)
    longest = config.max_model_len or min(MAX_MODEL_LEN, model.max_position_embeddings)
    config = EngineArgs(**engine | {"max_model_len": longest}).engine_config()
    tasks = published_tasks(model.vocab_size, num_requests, min_len, max_len, temperature)
    needed = max(len(task.prompt) + task.num_tokens for task in tasks)
    if needed > longest:
        raise ValueError(f"a prompt and its output have {needed} tokens: max_model_len is {longest}")
    return Load(config, model, tasks)


def published_tasks(vocab_size: int, count: int, low: int, high: int, temperature: float) -> list[Task]:
    """Drawn in the order of that benchmark: all prompts, then all lengths of outputs."""
    rng, last = random.Random(0), min(LAST_ID, vocab_size - 1)
    prompts = [[rng.randint(0, last) for _ in range(rng.randint(low, high))] for _ in range(count)]
    return [Task(prompt, rng.randint(low, high), temperature) for prompt in prompts]


def warm_up(tasks: list[Task]) -> list[Task]:
    first = tasks[0]
    return [Task(first.prompt, min(first.num_tokens, WARM_UP_TOKENS), first.temperature)]


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
