"""nano-vllm's published workload: this engine, then transformers' continuous batching, one round each.

bench.py of GeeeekExplorer/nano-vllm: 256 prompts of 100 to 1,024 random tokens, and as many tokens of each output,
142,827 in and 133,966 out.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib.util import find_spec
from typing import Any

from ..checkpoints.model_config import read_model_config
from ..engine.block_manager import cdiv
from ..engine.config import EngineArgs
from ..llm import LLM
from ..log import tell
from .bench_options import Published
from .engine import Run, free_memory, load_llm, numbers, serve
from .floor import device_bandwidth, floor_note, slots_read, weight_bytes
from .peer import PeerProcess, PeerSpec, peer_settings
from .report import Report, machine, report_of
from .workers.worker import Settings
from .workload import Task, check_lengths, published_tasks

OWN, PEER = "nanovllm", "generate_batch"
MAX_MODEL_LEN = 4096  # as in that benchmark
WARM_UP_TOKENS = 8


def bytes_read(llm: LLM) -> Callable[[Sequence[Task], Run], int]:
    """Return a function that counts the least that a device reads for the tokens that a run has generated.

    A run reads the weights once per step, and the keys and values of each context. Computing the prompts is left out:
    it is a small part on a GPU.
    """
    step_bytes, slot_bytes, seats = weight_bytes(llm), llm.llm_engine.kv_cache.bytes_per_token, llm.config.max_num_seqs

    def count(tasks: Sequence[Task], run: Run) -> int:
        lengths = [len(each) for each in run.tokens]
        num_steps = max(*lengths, cdiv(sum(lengths), seats))
        slots = slots_read([Task(task.prompt, count) for task, count in zip(tasks, lengths, strict=True)])
        return num_steps * step_bytes + slots * slot_bytes

    return count


def published(engine: dict[str, Any], options: Published) -> Report:
    """Serve the workload with this engine and, if options.peer, with transformers."""
    engine, tasks = workload(engine, options)
    device = EngineArgs(**engine).engine_config().torch_device()
    bandwidth = device_bandwidth(device)  # before the engine's pool fills a GPU
    free_memory()
    own, num_bytes, where, peer = serve_by_engine(engine, tasks, options.peer_seconds)
    runs, versions, says = {OWN: own}, dict[str, str](), list[str]()
    if options.peer:
        try:
            runs[PEER], versions[PEER] = serve_by_peer(peer, tasks)
        except ValueError as error:
            says.append(f"{PEER}: {error}")
    expected = sum(task.num_output_tokens for task in tasks)
    if PEER in runs and (run := runs[PEER]).num_tokens < expected:
        counts = f"{run.num_tokens:,} of {expected:,} tokens"
        says.append(f"{PEER} was stopped after {run.seconds:.0f} seconds, with {counts}")
    measured = {name: numbers([run]) for name, run in runs.items()}
    for name, run in runs.items():
        share = num_bytes(tasks, run) / bandwidth / run.seconds
        measured[name] |= {"tokens": run.num_tokens, "share of the floor": share}
    if PEER in runs:
        measured[PEER][f"{OWN}'s speedup"] = runs[OWN].tokens_per_second / runs[PEER].tokens_per_second
    named: dict[str, Any] = {"num_requests": options.num_requests, "temperature": options.temperature}
    named |= {"lengths": f"{options.min_len} to {options.max_len}", "prompt_tokens": sum(len(t.prompt) for t in tasks)}
    says += ["tokens: of outputs; times in ms: p50 / p90 / p99; all requests come at once", floor_note(bandwidth)]
    return report_of("published", named, where | versions, measured, says)


def workload(engine: dict[str, Any], options: Published) -> tuple[dict[str, Any], list[Task]]:
    """Return the engine's options and the tasks. Raise ValueError if a task has too many tokens for the model."""
    if options.min_len > options.max_len:
        raise ValueError(f"--min-len must be at most --max-len {options.max_len}, got {options.min_len}")
    config = EngineArgs(**engine).engine_config()
    model = read_model_config(config.model)
    longest = config.max_model_len or min(MAX_MODEL_LEN, model.max_position_embeddings)
    lengths = options.min_len, options.max_len
    tasks = published_tasks(model.vocab_size, options.num_requests, *lengths, options.temperature)
    check_lengths(tasks, longest)
    return engine | {"max_model_len": longest}, tasks


def serve_by_engine(
    engine: dict[str, Any], tasks: list[Task], peer_seconds: float
) -> tuple[Run, Callable[[Sequence[Task], Run], int], dict[str, Any], Settings]:
    """Return the run, bytes_read() and machine of this engine, whose memory it frees, and a peer's settings."""
    llm = load_llm(engine)
    serve(llm, [tasks[0].shortened(WARM_UP_TOKENS)], detokenize=False)
    run = serve(llm, tasks, detokenize=False)
    tell(f"{OWN}: {run.tokens_per_second:,.1f} tokens per second")  # the peer takes minutes, and may be stopped
    peer = peer_settings(llm, tasks, temperature=tasks[0].temperature, max_seconds=peer_seconds)
    return run, bytes_read(llm), machine(llm), peer


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
