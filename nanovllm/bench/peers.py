"""This engine next to others with the same weights: all of them take turns serving the same jobs.

Each other engine runs in a process of its own, by an interpreter that has it; workers/worker.py has the protocol.

At long contexts, this engine decodes alone, from prompts that it doesn't compute.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from ..checkpoints.model_config import read_model_config
from ..engine import sequence
from ..engine.config import POOL_SIZES, EngineArgs
from ..engine.sampling_params import SamplingParams
from ..llm import LLM
from .bench_options import Peers, whole_numbers
from .engine import Run, load_llm, serve
from .floor import Floor, device_bandwidth
from .harness import Spread, ratio, take_turns
from .report import Report, has_random_weights, last_line, machine, report_of, settings
from .workers.worker import Settings
from .workload import Task, check_lengths, mixed_tasks, random_tasks

OWN = "nanovllm"
LOADERS = {"vllm": "serve_vllm:load", "llama.cpp": "serve_llama_cpp:load"}  # a module of workers/, and its function
LOADERS |= {"transformers": "serve_transformers:load", "transformers-batch": "serve_transformers:load_batch"}
WORKER = Path(__file__).with_name("workers") / "worker.py"
NEEDS_FILE = ("llama.cpp",)
LENGTHS = 512  # max_model_len is rounded up to a multiple of it: vLLM compiles for a minute for each new length
DECODE_LENGTH, WARM_UP_TOKENS = 128, 8
NUM_STEPS = 8  # decode steps at a long context
MAX_IDLE_SHARE = 0.05  # of a core, while other engines compute
Serve = Callable[[Sequence[Task]], Run]


class PeerSpec(NamedTuple):
    """An engine, and the interpreter that runs it."""

    name: str
    python: str
    file: str = ""

    @classmethod
    def of(cls, text: str) -> Self:
        """Read a --peer option. Raise ValueError for an invalid one.

        >>> PeerSpec.of("llama.cpp=/opt/llama/bin/python,model.gguf")
        PeerSpec(name='llama.cpp', python='/opt/llama/bin/python', file='model.gguf')
        """
        name, _, rest = text.partition("=")
        python, _, file = rest.partition(",")
        if name not in LOADERS or not python:
            raise ValueError(f"--peer must be NAME=PYTHON or NAME=PYTHON,FILE for {', '.join(LOADERS)}, got {text!r}")
        if (name in NEEDS_FILE) != bool(file):
            need = "needs its weights, as NAME=PYTHON,FILE.gguf" if name in NEEDS_FILE else "takes no file"
            raise ValueError(f"--peer {text}: {name} {need}")
        return cls(name, python, file)


TRANSFORMERS = PeerSpec("transformers", sys.executable)  # of this environment


def peer_specs(texts: Sequence[str], with_transformers: bool) -> list[PeerSpec]:
    """Return the peers that --peer names, and transformers if it is installed here and not named."""
    specs = [PeerSpec.of(text) for text in texts]
    names = [spec.name for spec in specs]
    if len({*names}) < len(names):
        raise ValueError(f"--peer names an engine twice: {', '.join(names)}")
    if with_transformers and "transformers" not in names and find_spec("transformers") is not None:
        specs.append(TRANSFORMERS)
    return specs


def peer_settings(llm: LLM, tasks: Sequence[Task], **more: Any) -> Settings:
    """Return a peer's settings for the same weights, with room for the tasks."""
    longest = max(task.num_tokens for task in tasks)
    longest = min(-(-longest // LENGTHS) * LENGTHS, llm.max_model_len)
    seats = min(llm.config.max_num_seqs, len(tasks))
    num_bytes, dtype = seats * longest * llm.llm_engine.kv_cache.bytes_per_token, str(llm.llm_engine.dtype)
    more |= {"device": str(llm.llm_engine.device), "load_format": llm.config.load_format}
    more |= {"quantization": llm.config.quantization}
    model, dtype = str(llm.config.model), dtype.removeprefix("torch.")
    return Settings(model, dtype, torch.get_num_threads(), longest, seats, num_bytes, **more)


class PeerProcess:
    """A peer's process. It waits for input while others are measured. All errors are ValueErrors that name the peer."""

    def __init__(self, spec: PeerSpec, settings: Settings) -> None:
        """Start the process, and wait until its engine is loaded."""
        self.name = spec.name
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # close() closes it
        given = json.dumps(settings._replace(file=spec.file)._asdict())
        command = [spec.python, str(WORKER), LOADERS[spec.name], given]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._stderr}
        environment = os.environ | {"OMP_NUM_THREADS": str(settings.threads)}
        try:
            self._process = subprocess.Popen(command, **pipes, text=True, env=environment)
        except OSError as error:
            raise ValueError(f"{self.name}: cannot run {spec.python!r}: {error.strerror}") from None
        try:
            self.version = str(self._read("version")["version"])
        except BaseException:
            self.close()
            raise

    def serve(self, tasks: Sequence[Task], may_be_cut: bool = False) -> Run:
        """Serve all tasks together. Raise ValueError if the peer fails or returns the wrong number of tokens."""
        job = {"prompts": [task.prompt for task in tasks], "lengths": [task.num_output_tokens for task in tasks]}
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # the process has died; the read below reports why
        run = Run(**self._read("tokens", "times", "idle_cpu_seconds"))
        if fault := run.fault(tasks, may_be_cut):
            raise ValueError(f"{self.name} returned {fault}")
        return run

    def _read(self, *names: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._stderr.seek(0)
            status, last = self._process.wait(), last_line(self._stderr.read())
            raise ValueError(f"{self.name} ended with exit status {status}: {last}")
        try:
            values = json.loads(line)
            error = values.get("error")
            result = {name: values[name] for name in names} if error is None else {}
        except (ValueError, KeyError, AttributeError):
            raise ValueError(f"{self.name} printed {line.strip()[:80]!r}, not JSON with {', '.join(names)}") from None
        if error is not None:
            raise ValueError(f"{self.name}: {error}")
        return result

    def close(self) -> None:
        """End the process by closing its input, and kill it if it doesn't exit soon."""
        try:
            self._process.communicate(timeout=5)
        except (subprocess.TimeoutExpired, OSError, ValueError):
            self._process.kill()
            self._process.wait()
        self._stderr.close()


# ---- nanovllm bench peers


class Job(NamedTuple):
    """Tasks that are served at once. The speed of a decode job counts only its decode steps."""

    name: str
    tasks: list[Task]
    is_decode: bool
    is_own: bool = False  # for this engine alone, which takes the prompts as computed

    def speed(self, run: Run) -> float:
        """Return tokens per second."""
        return run.decoded_per_second if self.is_decode else run.tokens_per_second

    @property
    def num_steps(self) -> int:
        """The fewest steps. A prompt takes one."""
        return max(task.num_output_tokens for task in self.tasks) - self.is_decode


def peers(engine: dict[str, Any], options: Peers) -> Report:
    """Race the engines on all jobs, and let this one decode at long contexts."""
    specs, config = peer_specs(options.peer, options.transformers), EngineArgs(**engine).engine_config()
    jobs = make_jobs(options, read_model_config(config.model, config.hf_overrides).vocab_size)
    llm = load_llm(engine | with_room(engine, jobs))
    num_slots = llm.llm_engine.kv_cache.num_blocks * config.block_size
    for job in jobs:
        check_lengths(job.tasks, llm.max_model_len)
        if job.is_own and sum(task.num_tokens for task in job.tasks) > num_slots:
            lengths = f"{len(job.tasks)} contexts of {len(job.tasks[0].prompt)} tokens"
            raise ValueError(f"{lengths} do not fit in the pool of {num_slots} slots")
    shown = ("jobs", "rounds", *(("contexts",) if options.contexts else ()))
    return compare(llm, specs, jobs, options.rounds, {name: settings(options)[name] for name in shown})


def make_jobs(options: Peers, vocab_size: int) -> list[Job]:
    """Return the jobs of --jobs (`mixed`, and numbers of sequences that decode together) and of --contexts."""
    names = [name.strip() for name in options.jobs.split(",") if name.strip()]
    jobs = [Job("mixed", mixed_tasks(vocab_size), is_decode=False)] if "mixed" in names else []
    for count in whole_numbers("--jobs", ",".join(name for name in names if name != "mixed")):
        tasks = random_tasks(vocab_size, count, DECODE_LENGTH, DECODE_LENGTH)
        jobs.append(Job(f"{count} sequence{'s' * (count > 1)}", tasks, is_decode=True))
    for context in whole_numbers("--contexts", options.contexts):
        tasks = random_tasks(vocab_size, options.context_batch, context, 1 + NUM_STEPS)
        jobs.append(Job(f"context {context:,}", tasks, is_decode=True, is_own=True))
    return jobs


def with_room(engine: dict[str, Any], jobs: Sequence[Job]) -> dict[str, Any]:
    """Return options for long contexts: a pool for any of the jobs, unless its size is given, and all in one step."""
    batches = [len(job.tasks) for job in jobs if job.is_own]
    slots = [sum(task.num_tokens + engine["block_size"] for task in job.tasks) for job in jobs]
    if not batches:
        return {}
    room = int(max(slots) / (1 - engine["watermark"])) + 1  # with what admission leaves free
    pool = {} if any(engine[size] for size in POOL_SIZES) else {"kv_cache_tokens": room}
    return pool | {name: max(engine[name], *batches) for name in ("max_num_seqs", "max_num_batched_tokens")}


def compare(llm: LLM, specs: Sequence[PeerSpec], jobs: Sequence[Job], rounds: int, named: dict[str, Any]) -> Report:
    """Load all engines, then serve each job with one engine at a time."""
    engines: dict[str, Serve] = {OWN: partial(serve, llm, detokenize=False)}
    versions, says, floor = dict[str, str](), list[str](), Floor.of(llm)
    shared_tasks = [task for job in jobs if not job.is_own for task in job.tasks]
    with ExitStack() as stack:
        for spec in specs if shared_tasks else ():
            process = stack.enter_context(closing(PeerProcess(spec, peer_settings(llm, shared_tasks))))
            engines[spec.name], versions[spec.name] = process.serve, process.version
        measured: dict[str, dict[str, Any]] = {name: {} for name in engines}
        for job in jobs:
            racing: dict[str, Serve] = {OWN: partial(serve_as_computed, llm)} if job.is_own else engines
            for warm_up in racing.values():
                warm_up([task.shortened(WARM_UP_TOKENS) for task in job.tasks])
            calls: dict[str, Callable[[], Any]] = {name: partial(each, job.tasks) for name, each in racing.items()}
            calls["read"] = partial(device_bandwidth, llm.llm_engine.device)
            results = take_turns(calls, rounds, warm_ups=0, title=job.name)
            for name in racing:
                measured[name] |= numbers(floor, job, name, results)
            says += [f"{job.name}: {line}" for line in conclusions(llm, floor, job, results)]
    return report_of("peers", named, machine(llm) | versions, measured, says)


def numbers(floor: Floor, job: Job, name: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return medians of the rounds, and the spread of speeds. "read" has the bytes that memory reads per second."""
    runs, num_bytes = [each[name] for each in results], floor.num_bytes(job.tasks, job.num_steps)
    seconds = [run.decode_seconds if job.is_decode else run.seconds for run in runs]
    shares = [num_bytes / each["read"] / own_seconds for each, own_seconds in zip(results, seconds, strict=True)]
    shown: dict[str, Any] = {
        f"{job.name}: tokens per second": Spread.of([job.speed(run) for run in runs])._asdict(),
        f"{job.name}: share of the floor": statistics.median(shares),
    }
    if job.is_decode:
        shown[f"{job.name}: step ms"] = 1000 * statistics.median(run.step_seconds for run in runs)
    if name != OWN:
        shown[f"{job.name}: {OWN}'s speedup"] = ratio(results, OWN, name, job.speed)._asdict()
    return shown


def conclusions(llm: LLM, floor: Floor, job: Job, results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield notes: the floor, how far the tokens agree, and engines that were busy out of turn."""
    bandwidth, kv_bytes = statistics.median(each["read"] for each in results), floor.num_bytes(job.tasks, num_steps=0)
    read = f"weights of {floor.step_bytes / 1e9:.3g} GB and {kv_bytes / 1e9:.3g} GB of keys and values"
    yield f"the floor is {job.num_steps} steps that read {read}, at {bandwidth / 1e9:.1f} GB/s"
    runs = {name: [each[name] for each in results] for name in results[0] if name != "read"}
    total = sum(run.seconds for own in runs.values() for run in own)
    for name, own in runs.items():
        if name != OWN and not has_random_weights(llm):  # each engine makes its own random weights
            yield f"{name}: {agreement(llm, job.tasks, runs[OWN][-1], own[-1])}"
        used, others = sum(run.idle_cpu_seconds for run in own), total - sum(run.seconds for run in own)
        if others and used > MAX_IDLE_SHARE * others:
            yield f"{name} used {used / others:.0%} of a core while other engines computed"


# ---- the same tokens?


def agreement(llm: LLM, tasks: Sequence[Task], own: Run, other: Run) -> str:
    """Say how many outputs are equal, and how near to a tie the others were at their first different token.

    After that token the engines continue different texts, so nothing can be compared there.
    """
    texts = []
    for task, ours, theirs in zip(tasks, own.tokens, other.tokens, strict=True):
        places = (place for place, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
        if (place := next(places, None)) is not None:
            texts.append(task.prompt + ours[:place])
    if not texts:
        return f"the tokens of all {len(tasks)} requests are the same"
    equal, margin = len(tasks) - len(texts), max(margins(llm, texts))
    same = f"the tokens of {equal} of {len(tasks)} requests are the same"
    return f"{same}; where the others first differ, the two best logits are at most {margin:.2g} apart"


def margins(llm: LLM, texts: Sequence[list[int]]) -> list[float]:
    """Return how far apart the two best logits after each text are, as this engine computes them."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=2)
    outputs: list[Any] = llm.generate([*texts], params, use_tqdm=False)
    best = [sorted(each.logprob for each in output.outputs[0].logprobs[0].values()) for output in outputs]
    return [each[-1] - each[-2] for each in best]


# ---- long contexts


def serve_as_computed(llm: LLM, tasks: Sequence[Task]) -> Run:
    """Decode all tasks from prompts that are taken as computed."""
    with prompts_taken_as_computed(llm):
        return serve(llm, tasks, detokenize=False)


@contextmanager
def prompts_taken_as_computed(llm: LLM) -> Iterator[None]:
    """Treat the pool's contents as the keys and values of prompts.

    Computing real ones takes minutes and doesn't change the cost of a later step.
    """
    llm.llm_engine.kv_cache.blocks.fill_(0.01)  # untouched memory has no physical pages yet, and reading it is too fast
    manager = llm.llm_engine.kv_cache_manager
    allocate = manager.allocate

    def allocate_as_computed(seq: sequence.Sequence, hits: list[int | None]) -> None:
        allocate(seq, hits)
        seq.num_computed_tokens = seq.num_tokens - 1

    setattr(manager, "allocate", allocate_as_computed)  # noqa: B010  # mypy does not allow assigning a method
    try:
        yield
    finally:
        del manager.allocate
