"""nano-vllm's published workload: this engine, then transformers' continuous batching, one round each.

bench.py of GeeeekExplorer/nano-vllm: 256 prompts of 100 to 1,024 random tokens, and as many tokens of each output,
142,827 in and 133,966 out.
"""

import sys
from collections.abc import Sequence
from contextlib import closing
from importlib.util import find_spec
from typing import Any

from ..checkpoints.model_config import read_model_config
from ..engine.block_manager import cdiv
from ..engine.config import EngineArgs
from ..llm import LLM
from ..log import tell
from .engine import Run, free_memory, load_llm, numbers, serve
from .floor import device_bandwidth, slots_read, weight_bytes
from .options import Published, settings
from .peer import PeerProcess, PeerSpec, peer_settings
from .report import Report, machine
from .workers.worker import Settings
from .workload import Task, check_lengths, published_tasks

OWN, PEER = "nanovllm", "generate_batch"
MAX_MODEL_LEN = 4096  # as in that benchmark
WARM_UP_TOKENS = 8


class Floor:
    """The least that a device reads for a run: the weights once per step, and the keys and values of each context.

    Computing the prompts is left out: it is a small part on a GPU.
    """

    def __init__(self, llm: LLM) -> None:
        self.step_bytes, self.slot_bytes = weight_bytes(llm), llm.llm_engine.kv_cache.bytes_per_token
        self.max_num_seqs = llm.config.max_num_seqs

    def num_bytes(self, tasks: Sequence[Task], run: Run) -> int:
        """Return the bytes for the tokens that the run has generated."""
        lengths = [len(each) for each in run.tokens]
        num_steps = max(*lengths, cdiv(sum(lengths), self.max_num_seqs))
        slots = slots_read([Task(task.prompt, count) for task, count in zip(tasks, lengths, strict=True)])
        return num_steps * self.step_bytes + slots * self.slot_bytes


def published(engine: dict[str, Any], options: Published) -> Report:
    """Serve the workload with this engine and, if options.peer, with transformers."""
    engine, tasks = workload(engine, options)
    device = EngineArgs(**engine).engine_config().torch_device()
    bandwidth = device_bandwidth(device)  # before the engine's pool fills a GPU
    free_memory()
    own, floor, where, peer = serve_by_engine(engine, tasks, options.peer_seconds)
    runs, versions, says = {OWN: own}, dict[str, str](), list[str]()
    if options.peer:
        try:
            runs[PEER], versions[PEER] = serve_by_peer(peer, tasks)
            says += cut_note(tasks, runs[PEER])
        except ValueError as error:
            says.append(f"{PEER}: {error}")
    measured = {name: numbers([run]) for name, run in runs.items()}
    for name, run in runs.items():
        share = floor.num_bytes(tasks, run) / bandwidth / run.seconds
        measured[name] |= {"tokens": run.num_tokens, "share of the floor": share}
    if PEER in runs:
        measured[PEER][f"{OWN}'s speedup"] = runs[OWN].tokens_per_second / runs[PEER].tokens_per_second
    named = settings(options)
    return {
        "bench": "published",
        "settings": {name: named[name] for name in ("num_requests", "temperature")}
        | {"lengths": f"{options.min_len} to {options.max_len}", "prompt_tokens": sum(len(t.prompt) for t in tasks)},
        "machine": where | versions,
        "measured": measured,
        "says": [
            *says,
            "tokens: of outputs; times in ms: p50 / p90 / p99; all requests arrive together",
            f"floor: reading the weights once per step, and the KV cache, at {bandwidth / 1e9:.1f} GB/s",
        ],
    }


def workload(engine: dict[str, Any], options: Published) -> tuple[dict[str, Any], list[Task]]:
    """Return the engine's options and the tasks. Raise ValueError if a task has too many tokens for the model."""
    if options.min_len > options.max_len:
        raise ValueError(f"--min-len must be at most --max-len {options.max_len}, got {options.min_len}")
    config = EngineArgs(**engine).engine_config()
    model = read_model_config(config.model)
    longest = config.max_model_len or min(MAX_MODEL_LEN, model.max_position_embeddings)
    tasks = published_tasks(
        model.vocab_size, options.num_requests, options.min_len, options.max_len, options.temperature
    )
    check_lengths(tasks, longest)
    return engine | {"max_model_len": longest}, tasks


def serve_by_engine(
    engine: dict[str, Any], tasks: list[Task], peer_seconds: float
) -> tuple[Run, Floor, dict[str, Any], Settings]:
    """Return this engine's run, its floor and its machine, and a peer's settings. It frees the engine's memory."""
    llm = load_llm(engine)
    serve(llm, [tasks[0].shortened(WARM_UP_TOKENS)], detokenize=False)
    run = serve(llm, tasks, detokenize=False)
    tell(f"{OWN}: {run.tokens_per_second:,.1f} tokens per second")  # the peer takes minutes, and may be stopped
    peer = peer_settings(llm, tasks, temperature=tasks[0].temperature, max_seconds=peer_seconds)
    return run, Floor(llm), machine(llm), peer


def serve_by_peer(peer: Settings, tasks: list[Task]) -> tuple[Run, str]:
    """Return transformers' run and version."""
    if find_spec("transformers") is None:
        raise ValueError("transformers is not installed")
    free_memory()
    with closing(PeerProcess(PeerSpec("transformers-batch", sys.executable), peer)) as process:
        process.serve([tasks[0].shortened(WARM_UP_TOKENS)], may_be_cut=True)
        run = process.serve(tasks, may_be_cut=True)
    if not any(run.tokens):
        raise ValueError(f"no token arrived within {peer.max_seconds:g} seconds")
    return run, process.version


def cut_note(tasks: Sequence[Task], run: Run) -> list[str]:
    """Return a line if the peer was stopped before it had all tokens."""
    expected = sum(task.num_output_tokens for task in tasks)
    if run.num_tokens == expected:
        return []
    return [f"{PEER} was stopped after {run.seconds:.0f} seconds, with {run.num_tokens:,} of {expected:,} tokens"]
