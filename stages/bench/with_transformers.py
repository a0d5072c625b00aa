"""This engine beside transformers: throughput, latency, cached prefixes, and nano-vllm's published workload.

bench.py of GeeeekExplorer/nano-vllm: 256 prompts of 100 to 1,024 random tokens, and as many tokens of each output,
142,827 in and 133,966 out. It is served in one round; in the others, engines take turns.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

from nanovllm.bench import throughput as package
from nanovllm.bench.engine import Run, free_memory, load_llm, serve
from nanovllm.bench.floor import Floor, device_bandwidth, floor_note
from nanovllm.bench.report import OURS, Report, machine, report_of, settings
from nanovllm.bench.throughput import NOTE, Call, scores
from nanovllm.bench.workload import Task, check_lengths
from nanovllm.checkpoints.model_config import read_model_config
from nanovllm.llm import LLM
from nanovllm.log import tell
from nanovllm.options.engine_args import EngineArgs
from stages.bench.options import Published
from stages.bench.peers import TRANSFORMERS, WARM_UP_TOKENS, PeerProcess, peer_settings
from stages.bench.workers.worker import Settings
from stages.bench.workloads import published_tasks

BATCHES, PUBLISHED_MAX_MODEL_LEN = "generate_batch", 4096  # as in that benchmark


@contextmanager
def transformers(llm: LLM, tasks: Sequence[Task]) -> Iterator[tuple[Mapping[str, Call], list[str]]]:
    """Yield a call that runs transformers, or else a line for the report with the reason why there is none."""
    if find_spec("transformers") is None:
        yield {}, ["transformers is not installed"]
        return
    try:
        process = PeerProcess(TRANSFORMERS, peer_settings(llm, tasks))
    except ValueError as error:  # measure the engine anyway
        yield {}, [str(error)]
        return
    with closing(process):
        yield {"transformers": partial(process.serve, tasks)}, []


throughput = partial(package.throughput, peers=transformers)
latency = partial(package.latency, peers=transformers)
prefix = partial(package.prefix, peers=transformers)


# ---- nano-vllm's published workload


def published(engine: dict[str, Any], options: Published) -> Report:
    """Serve the workload with this engine, free its memory, and serve it with transformers if options.peer."""
    longest, tasks = workload(engine, options)
    llm = load_llm(engine | {"max_model_len": longest})
    serve(llm, [tasks[0].shortened(WARM_UP_TOKENS)], detokenize=False)
    own = serve(llm, tasks, detokenize=False)
    tell(f"{OURS}: {own.tokens_per_second:,.1f} tokens per second")  # the peer takes minutes, and may be stopped
    peer = peer_settings(llm, tasks, temperature=options.temperature, max_seconds=options.peer_seconds)
    floor, where, device, runs, says = (Floor.of(llm), machine(llm), llm.llm_engine.device, {OURS: own}, list[str]())
    del llm
    free_memory()
    bandwidth = device_bandwidth(device)  # needs memory, which the pool filled
    if options.peer:
        try:
            runs[BATCHES], where[BATCHES] = serve_by_peer(peer, tasks)
        except ValueError as error:
            says.append(f"{BATCHES}: {error}")
    if BATCHES in runs and runs[BATCHES].num_tokens < own.num_tokens:
        counts = f"{runs[BATCHES].num_tokens:,} of {own.num_tokens:,} tokens"
        says.append(f"{BATCHES} was stopped after {runs[BATCHES].seconds:.0f} seconds, with {counts}")
    named = settings(options) | {"prompt_tokens": sum(len(task.prompt) for task in tasks)}
    measured = scores([runs], tasks, floor, bandwidth)
    return report_of("published", named, where, measured, [NOTE, floor_note(bandwidth), *says])


def workload(engine: dict[str, Any], options: Published) -> tuple[int, list[Task]]:
    """Return max_model_len and the tasks. Raise ValueError if a task has too many tokens for the model."""
    if options.min_len > options.max_len:
        raise ValueError(f"--min-len must be at most --max-len {options.max_len}, got {options.min_len}")
    config = EngineArgs(**engine).engine_config()
    model = read_model_config(config.model, config.hf_overrides)
    longest = config.max_model_len or min(PUBLISHED_MAX_MODEL_LEN, model.max_position_embeddings)
    lengths = options.min_len, options.max_len
    tasks = published_tasks(model.vocab_size, options.num_requests, *lengths, options.temperature)
    check_lengths(tasks, longest)
    return longest, tasks


def serve_by_peer(peer: Settings, tasks: list[Task]) -> tuple[Run, str]:
    """Return transformers' run and version."""
    if find_spec("transformers") is None:
        raise ValueError("transformers is not installed")
    with closing(PeerProcess(TRANSFORMERS._replace(name="transformers-batch"), peer)) as process:
        process.serve([tasks[0].shortened(WARM_UP_TOKENS)], may_be_cut=True)
        run = process.serve(tasks, may_be_cut=True)
    if not any(run.tokens):
        raise ValueError(f"no token arrived within {peer.max_seconds:g} seconds")
    return run, process.version
