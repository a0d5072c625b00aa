"""This engine next to others with the same weights: all of them take turns serving the same jobs.

Each other engine runs in a process of its own, by an interpreter that has it; workers/worker.py has the protocol. An
engine with several settings in VARIANTS has a process for each, and each job counts at the best of them.

At long contexts, this engine decodes alone, from prompts that it doesn't compute.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from ctypes.util import find_library
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self

import torch

from nanovllm.bench.bench_options import whole_numbers
from nanovllm.bench.engine import Run, load_llm, serve
from nanovllm.bench.floor import Floor, device_bandwidth
from nanovllm.bench.harness import Spread, ratio, take_turns
from nanovllm.bench.report import OURS, Report, has_random_weights, last_line, machine, report_of, settings
from nanovllm.bench.workload import Task, check_lengths, mixed_tasks, random_tasks
from nanovllm.checkpoints.chat_template import render_chat
from nanovllm.checkpoints.gguf import Stored, read_header
from nanovllm.checkpoints.model_config import read_model_config
from nanovllm.checkpoints.sizes import kv_bytes_per_token
from nanovllm.engine import sequence
from nanovllm.llm import LLM
from nanovllm.options.config import POOL_SIZES, EngineConfig
from nanovllm.options.engine_args import EngineArgs
from nanovllm.requests.sampling_params import SamplingParams
from stages.bench.options import Peers
from stages.bench.workers.worker import Settings

UNQUANTIZED = "nanovllm, KV cache in the dtype"  # this engine again, at long contexts
LOADERS = {"vllm": "serve_vllm:load", "llama.cpp": "serve_llama_cpp:load"}  # a module of workers/, and its function
LOADERS |= {"transformers": "serve_transformers:load", "transformers-batch": "serve_transformers:load_batch"}
OWN_LOADER = "serve_nanovllm:load"
WORKER = Path(__file__).with_name("workers") / "worker.py"
QUESTIONS = Path(__file__).with_name("questions.txt")  # each asks for a long answer
PACKAGE_PARENT = Path(__file__).parents[2]
NEEDS_FILE = ("llama.cpp",)
LENGTHS = 512  # max_model_len is rounded up to a multiple of it: vLLM compiles for a minute for each new length
DECODE_LENGTH, WARM_UP_TOKENS = 128, 8
NUM_STEPS = 8  # decode steps at a long context
READ = ("read", "")  # the measurement of memory, which takes turns with the engines
MAX_IDLE_SHARE = 0.05  # of a core, while other engines compute


class Entrant(NamedTuple):
    """An engine in a race, with one of its settings."""

    serve: Callable[[Sequence[Task]], Run]
    floor: Floor


class Variant(NamedTuple):
    """A setting of a peer that is worth a try, and the people who recommend it."""

    name: str = ""
    advice: str = ""
    settings: Mapping[str, Any] = MappingProxyType({})  # for the worker
    libraries: tuple[str, ...] = ()  # to preload, without "lib" and suffix
    least_seats: int = 1  # with fewer sequences at a time, it changes nothing


VARIANTS = {
    "llama.cpp": (
        Variant("kv_unified=false", "the default of llama.cpp's library"),
        Variant(
            "kv_unified=true",
            "the default of llama-server, unless a number of slots is given",
            {"kv_unified": True},
            least_seats=2,
        ),
    ),
    "vllm": (
        Variant("nothing preloaded", "vLLM as pip installs it"),
        Variant(
            "tcmalloc and libiomp5 preloaded",
            "vLLM's log, and its installation guide for CPUs",
            libraries=("tcmalloc_minimal", "iomp5"),
        ),
    ),
}
PLAIN = Variant()
CLOSE = 0.9  # a variant races all rounds if it is at least this fast, compared with its engine's fastest one


def find_libraries(python: str, names: Sequence[str]) -> list[str]:
    """Return the libraries that are installed, in the interpreter's environment or else on the system."""
    root, found = Path(python).absolute().parent.parent, list[str]()
    for name in names:
        places = ("lib", "lib/python*/site-packages/*", "lib/python*/site-packages/*/libs")
        files = (str(file) for place in places for file in sorted(root.glob(f"{place}/lib{name}*.so*")))
        found += filter(None, [next(files, None) or find_library(name)])
    return found


class PeerSpec(NamedTuple):
    """An engine, and the interpreter that runs it."""

    name: str
    python: str
    file: str = ""
    label: str = ""  # tells engines of one name apart

    @classmethod
    def of(cls, text: str) -> Self:
        """Read a --peer option. Raise ValueError for an invalid one.

        >>> PeerSpec.of("llama.cpp:Q8_0=/opt/llama/bin/python,model.gguf")
        PeerSpec(name='llama.cpp', python='/opt/llama/bin/python', file='model.gguf', label='Q8_0')
        """
        named, _, rest = text.partition("=")
        name, _, label = named.partition(":")
        python, _, file = rest.partition(",")
        if name not in LOADERS or not python:
            raise ValueError(f"--peer must be NAME=PYTHON or NAME=PYTHON,FILE for {', '.join(LOADERS)}, got {text!r}")
        if (name in NEEDS_FILE) != bool(file):
            need = "needs its weights, as NAME=PYTHON,FILE.gguf" if name in NEEDS_FILE else "takes no file"
            raise ValueError(f"--peer {text}: {name} {need}")
        return cls(name, python, file, label)

    @property
    def title(self) -> str:
        """The engine's name in the report."""
        return f"{self.name} {self.label}".strip()

    def variants(self, seats: int) -> tuple[list[Variant], list[str]]:
        """Return the variants to try with so many sequences at a time, and a note for each that isn't possible."""
        usable, notes = list[Variant](), list[str]()
        for variant in VARIANTS.get(self.name, (PLAIN,)):
            if len(find_libraries(self.python, variant.libraries)) < len(variant.libraries):
                names = " and ".join(f"lib{name}" for name in variant.libraries)
                notes.append(f"{self.title} was not tried with {variant.name}: {names} must be installed")
            elif seats >= variant.least_seats:
                usable.append(variant)
        return usable, notes

    def tensors(self) -> dict[str, Stored]:
        """Return the tensors of its file, or none if it has no file that can be read here."""
        is_readable = self.file and find_spec("gguf") is not None and Path(self.file).is_file()
        return read_header(Path(self.file))[1] if is_readable else {}

    def floor(self, llm: LLM) -> Floor:
        """Return its floor: its weights may have fewer bits than those of `llm`."""
        floor, tensors = Floor.of(llm, self.label if self.name == OURS else None), self.tensors()
        unread = "token_embd.weight" if "output.weight" in tensors else ""
        num_bytes = sum(each.num_bytes for name, each in tensors.items() if name != unread)
        return floor._replace(step_bytes=num_bytes) if tensors else floor


TRANSFORMERS = PeerSpec("transformers", sys.executable)  # of this environment


def peer_specs(texts: Sequence[str], with_transformers: bool, formats: Sequence[str] = ()) -> list[PeerSpec]:
    """Return this engine with weights in `formats`, the peers that --peer names, and transformers if it is installed.

    Transformers is left out if --peer names it.
    """
    specs = [PeerSpec(OURS, sys.executable, label=each) for each in formats] + [PeerSpec.of(text) for text in texts]
    names = [spec.title for spec in specs]
    if len({*names}) < len(names):
        raise ValueError(f"--peer names an engine twice: {', '.join(names)}")
    if with_transformers and "transformers" not in names and find_spec("transformers") is not None:
        specs.append(TRANSFORMERS)
    return specs


def peer_settings(llm: LLM, *jobs: Sequence[Task], **more: Any) -> Settings:
    """Return a peer's settings for the same weights, with room for the tasks of any of the jobs."""
    longest = max(task.num_tokens for tasks in jobs for task in tasks)
    longest = min(-(-longest // LENGTHS) * LENGTHS, llm.max_model_len)
    seats = min(llm.config.max_num_seqs, max(map(len, jobs)))
    engine = llm.llm_engine
    token_bytes = kv_bytes_per_token(engine.model_config, engine.dtype.itemsize)  # a peer's cache is not in int8
    more |= {"device": str(llm.llm_engine.device), "load_format": llm.config.load_format}
    model, dtype = str(llm.config.model), str(engine.dtype).removeprefix("torch.")
    return Settings(model, dtype, torch.get_num_threads(), longest, seats, seats * longest * token_bytes, **more)


class PeerProcess:
    """A peer's process. It waits for input while others are measured. All errors are ValueErrors that name the peer."""

    def __init__(self, spec: PeerSpec, settings: Settings, variant: Variant = PLAIN) -> None:
        """Start the process, and wait until its engine is loaded."""
        self.name = spec.title
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # close() closes it
        settings = settings._replace(file=spec.file, quantization=spec.label if spec.name == OURS else None)
        settings = settings._replace(**variant.settings)
        command = [spec.python, str(WORKER), LOADERS.get(spec.name, OWN_LOADER), json.dumps(settings._asdict())]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._stderr}
        environment = os.environ | {"OMP_NUM_THREADS": str(settings.threads)}
        if variant.libraries:
            given = filter(None, [os.environ.get("LD_PRELOAD")])
            environment["LD_PRELOAD"] = ":".join([*find_libraries(spec.python, variant.libraries), *given])
        if spec.name == OURS:
            environment["PYTHONPATH"] = os.pathsep.join([str(PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")])
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


# ---- the race


class Job(NamedTuple):
    """Tasks that are served at once."""

    name: str
    tasks: list[Task]
    kind: Literal["all", "decode", "prompt"]  # what counts: all tokens, those of decode steps, or the first token
    is_own: bool = False  # for this engine alone, which takes the prompts as computed
    is_busy: bool = False  # beside another process that computes all the time

    def speed(self, run: Run) -> float:
        """Return tokens per second, or prompts per second."""
        if self.kind == "prompt":
            return 1 / run.seconds
        return run.decoded_per_second if self.kind == "decode" else run.tokens_per_second

    @property
    def num_steps(self) -> int:
        """The fewest steps. A prompt takes one."""
        return max(task.num_output_tokens for task in self.tasks) - (self.kind == "decode")


def peers(engine: dict[str, Any], options: Peers) -> Report:
    """Race the engines on all jobs, and let this one decode at long contexts."""
    formats = [name.strip() for name in options.formats.split(",") if name.strip()]
    specs = peer_specs(options.peer, options.transformers, formats)
    config = EngineArgs(**engine).engine_config()
    jobs = make_jobs(options, read_model_config(config.model, config.hf_overrides).vocab_size)
    if options.written:  # the template's words are the same in all prompts, and peers have no prefix cache
        engine = engine | {"enable_prefix_caching": False}
    llm = load_llm(engine | with_room(engine, jobs))
    if options.written:
        jobs = [job if job.is_own or job.kind == "prompt" else with_questions(llm, job) for job in jobs]
    num_slots = llm.llm_engine.kv_cache.num_blocks * config.block_size
    for job in jobs:
        check_lengths(job.tasks, llm.max_model_len)
        if job.is_own and sum(task.num_tokens for task in job.tasks) > num_slots:
            lengths = f"{len(job.tasks)} contexts of {len(job.tasks[0].prompt)} tokens"
            raise ValueError(f"{lengths} do not fit in the pool of {num_slots} slots")
    given, unquantized = settings(options), None
    if options.contexts and (llm.llm_engine.kv_cache.is_int8 or llm.llm_engine.kv_cache.is_fp8):
        room = with_room(engine, jobs) | dict.fromkeys(POOL_SIZES) | {"kv_cache_tokens": num_slots}
        unquantized = load_llm(engine | room | {"kv_cache_dtype": "auto"})
    others = ("written", "formats", "prompts", "busy_jobs", "contexts")
    shown = ("jobs", "rounds", *(name for name in others if given[name]))
    return compare(llm, specs, jobs, options.rounds, {name: given[name] for name in shown}, unquantized)


def make_jobs(options: Peers, vocab_size: int) -> list[Job]:
    """Return the jobs of --jobs, --prompts and --busy-jobs, and of --contexts, which are for this engine alone."""
    jobs = named_jobs("--jobs", options.jobs, vocab_size)
    for length in whole_numbers("--prompts", options.prompts):
        jobs.append(Job(f"prompt {length:,}", random_tasks(vocab_size, 1, length, 1), "prompt"))
    for job in named_jobs("--busy-jobs", options.busy_jobs, vocab_size):
        jobs.append(job._replace(name=f"{job.name} beside a busy process", is_busy=True))
    for context in whole_numbers("--contexts", options.contexts):
        tasks = random_tasks(vocab_size, options.context_batch, context, 1 + NUM_STEPS)
        jobs.append(Job(f"context {context:,}", tasks, "decode", is_own=True))
    return jobs


def named_jobs(option: str, text: str, vocab_size: int) -> list[Job]:
    """Return the jobs that an option lists: `mixed`, and numbers of sequences that decode together."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    jobs = [Job("mixed", mixed_tasks(vocab_size), "all")] if "mixed" in names else []
    for count in whole_numbers(option, ",".join(name for name in names if name != "mixed")):
        tasks = random_tasks(vocab_size, count, DECODE_LENGTH, DECODE_LENGTH)
        jobs.append(Job(f"{count} sequence{'s' * (count > 1)}", tasks, "decode"))
    return jobs


def with_questions(llm: LLM, job: Job) -> Job:
    """Return the job with a written question in each prompt, in the model's chat template."""
    questions, tokenizer, tasks = QUESTIONS.read_text(encoding="utf-8").splitlines(), llm.get_tokenizer(), list[Task]()
    if len(job.tasks) > len(questions):
        raise ValueError(f"--written has {len(questions)} questions, but {job.name} need {len(job.tasks)}")
    for task, question in zip(job.tasks, questions, strict=False):
        text = render_chat(tokenizer, [{"role": "user", "content": question}])
        tasks.append(task._replace(prompt=tokenizer.encode(text, add_special_tokens=False)))
    return job._replace(tasks=tasks)


def with_room(engine: dict[str, Any], jobs: Sequence[Job]) -> dict[str, Any]:
    """Return options for long contexts: a pool for any of the jobs, unless its size is given, and all in one step."""
    batches = [len(job.tasks) for job in jobs if job.is_own]
    slots = [sum(task.num_tokens + engine["block_size"] for task in job.tasks) for job in jobs]
    if not batches:
        return {}
    room = int(max(slots) / (1 - engine["watermark"])) + 1  # with what admission leaves free
    pool = {} if any(engine[size] for size in POOL_SIZES) else {"kv_cache_tokens": room}
    most = {name: engine[name] or getattr(EngineConfig, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
    return pool | {name: max(limit, *batches) for name, limit in most.items()}


def compare(
    llm: LLM, specs: Sequence[PeerSpec], jobs: Sequence[Job], rounds: int, named: dict[str, Any], other: LLM | None
) -> Report:
    """Serve each job with one engine at a time. All engines are loaded before the first job of a group.

    Long prompts are a group of their own, because room for many sequences of that length would fill the memory.
    `other` is the same engine with another KV cache, which takes part at long contexts.
    """
    versions, notes = dict[str, str](), list[str]()
    own = {OURS: llm} | ({} if other is None else {UNQUANTIZED: other})
    log = Log({name: {} for name in (*own, *(spec.title for spec in specs))}, defaultdict(dict), defaultdict(dict))
    shared = [job for job in jobs if not job.is_own]
    for group in ([job for job in shared if job.kind != "prompt"], [job for job in shared if job.kind == "prompt"]):
        with ExitStack() as stack:
            engines = {OURS: {"": Entrant(partial(serve, llm, detokenize=False), Floor.of(llm))}}
            for spec in specs if group else ():
                wanted = peer_settings(llm, *(job.tasks for job in group))
                variants, reasons = spec.variants(wanted.max_num_seqs)
                notes += [reason for reason in reasons if reason not in notes]
                engines[spec.title] = {}
                for variant in variants:
                    process = stack.enter_context(closing(PeerProcess(spec, wanted, variant)))
                    versions[spec.title] = described(spec, process.version)
                    engines[spec.title][variant.name] = Entrant(process.serve, spec.floor(llm))
            for job in group:
                notes += race(llm, job, engines, rounds, log)
    for job in (job for job in jobs if job.is_own):
        alone = {name: {"": Entrant(partial(serve_as_computed, each), Floor.of(each))} for name, each in own.items()}
        notes += race(llm, job, alone, rounds, log)
    tried = {spec.name: VARIANTS[spec.name] for spec in specs if spec.title in log.variants}
    advice = {name: {each.name: each.advice for each in own} for name, own in tried.items()}
    more = {"variants": log.variants, "advice": advice, "agreement": log.agreement}
    return report_of("race", named, machine(llm) | versions, log.measured, notes, **more)


class Log(NamedTuple):
    """The figures of each engine that a report shows, by title."""

    measured: dict[str, dict[str, Any]]  # by number
    variants: dict[str, dict[str, Any]]  # by job: the best variant, and the speeds of all
    agreement: dict[str, dict[str, Any]]  # by job


def race(llm: LLM, job: Job, engines: Mapping[str, Mapping[str, Entrant]], rounds: int, log: Log) -> Iterator[str]:
    """Serve a job with each engine, add the numbers of its best variant to `log`, and yield notes.

    If an engine has several variants, each serves the job once; those that come close to the best race all rounds.
    """
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, entrants in engines.items():
        for variant, each in entrants.items():
            each.serve([task.shortened(WARM_UP_TOKENS) for task in job.tasks])
            calls[name, variant] = partial(each.serve, job.tasks)
    with busy_process() if job.is_busy else nullcontext():
        [trial] = take_turns({key: call for key, call in calls.items() if len(engines[key[0]]) > 1}, 1, warm_ups=0)
        speeds = {key: [job.speed(run)] for key, run in trial.items()}
        racing = {key: call for key, call in calls.items() if key not in trial or is_close(key, speeds)}
        racing[READ] = partial(device_bandwidth, llm.llm_engine.device)
        results = take_turns(racing, rounds, warm_ups=0, title=job.name)
    del racing[READ]
    speeds |= {key: [job.speed(each[key]) for each in results] for key in racing}
    medians = {key: statistics.median(speeds[key]) for key in racing}
    best = {name: max((key for key in racing if key[0] == name), key=medians.__getitem__) for name in engines}
    shown = [{name: each[key] for name, key in best.items()} | {"read": each[READ]} for each in results]
    for name, (_, variant) in best.items():
        log.measured[name] |= numbers(engines[name][variant].floor, job, name, shown)
        if len(engines[name]) > 1:
            spreads = {each: Spread.of(speeds[name, each])._asdict() for each in engines[name]}
            log.variants[name][job.name] = {"best": variant, "speeds": spreads}
            yield f"{job.name}: {name} is fastest with {variant}"
        if name != OURS and not job.is_own and not has_random_weights(llm):  # each engine makes its own random weights
            log.agreement[name][job.name] = agreement(llm, job.tasks, shown[-1][OURS], shown[-1][name])._asdict()
    runs = {" with ".join(filter(None, key)): [each[key] for each in results] for key in racing}
    for line in (*floor_notes(Floor.of(llm), job, shown), *agreement_notes(job, log), *idle_notes(runs)):
        yield f"{job.name}: {line}"


def is_close(key: tuple[str, str], speeds: Mapping[tuple[str, str], Sequence[float]]) -> bool:
    """Return whether a variant is nearly as fast as the fastest one of its engine.

    >>> speeds = {("a", "x"): [10.0], ("a", "y"): [9.5], ("a", "z"): [8.0], ("b", "x"): [99.0]}
    >>> [is_close(key, speeds) for key in speeds]
    [True, True, False, True]
    """
    return speeds[key][0] >= CLOSE * max(own[0] for (name, _), own in speeds.items() if name == key[0])


@contextmanager
def busy_process() -> Iterator[None]:
    """Let another process use one core."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def described(spec: PeerSpec, version: str) -> str:
    """Return the version of a peer, and how many tensors of its file have which type."""
    types = Counter(each.type for each in spec.tensors().values())
    return ", ".join([version, *(f"{count} {name}" for name, count in types.most_common())])


def numbers(floor: Floor, job: Job, name: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return medians of the rounds, and the spread of speeds. "read" has the bytes that memory reads per second."""
    runs: list[Run] = [each[name] for each in results]
    shown: dict[str, Any]
    if job.kind == "prompt":
        shown = {f"{job.name}: first token ms": Spread.of([1000 * run.seconds for run in runs])._asdict()}
    else:
        num_bytes = floor.num_bytes(job.tasks, job.num_steps)
        seconds = [run.decode_seconds if job.kind == "decode" else run.seconds for run in runs]
        shares = [num_bytes / each["read"] / own for each, own in zip(results, seconds, strict=True)]
        shown = {
            f"{job.name}: tokens per second": Spread.of([job.speed(run) for run in runs])._asdict(),
            f"{job.name}: share of the floor": statistics.median(shares),
        }
    if job.kind == "decode":
        shown[f"{job.name}: step ms"] = 1000 * statistics.median(run.step_seconds for run in runs)
    if name != OURS:
        shown[f"{job.name}: {OURS}'s speedup"] = ratio(results, OURS, name, job.speed)._asdict()
    return shown


def floor_notes(floor: Floor, job: Job, results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what this engine has to read, and how fast memory is."""
    if job.kind != "prompt":
        bandwidth, kv_bytes = statistics.median(each["read"] for each in results), floor.num_bytes(job.tasks, 0)
        read = f"weights of {floor.step_bytes / 1e9:.3g} GB and {kv_bytes / 1e9:.3g} GB of keys and values"
        yield f"the floor is {job.num_steps} steps that read {read}, at {bandwidth / 1e9:.1f} GB/s"


def agreement_notes(job: Job, log: Log) -> Iterator[str]:
    """Yield how far each engine's tokens agree with this engine's."""
    for name, by_job in log.agreement.items():
        if job.name in by_job:
            yield f"{name}: {Agreement(**by_job[job.name]).text()}"


def idle_notes(runs: Mapping[str, Sequence[Run]]) -> Iterator[str]:
    """Yield the engines that were busy out of turn."""
    total = sum(run.seconds for own in runs.values() for run in own)
    for name, own in runs.items():
        used, others = sum(run.idle_cpu_seconds for run in own), total - sum(run.seconds for run in own)
        if others and used > MAX_IDLE_SHARE * others:
            yield f"{name} used {used / others:.0%} of a core while other engines computed"


# ---- the same tokens?


class Agreement(NamedTuple):
    """The agreement of two engines' outputs. After their first difference they continue different texts."""

    shares: list[float]  # of each output's tokens, up to its end, those before the first difference
    margin: float  # where outputs first differ, the two best logits are at most this far apart; 0 if none differs

    def text(self) -> str:
        """Return the agreement as a note.

        >>> Agreement([1.0, 1.0], 0.0).text()
        'the tokens of all 2 requests are the same'
        """
        equal = sum(share == 1 for share in self.shares)
        if equal == len(self.shares):
            return f"the tokens of all {equal} requests are the same"
        same = f"the tokens of {equal} of {len(self.shares)} requests are the same"
        return f"{same}; where the others first differ, the two best logits are at most {self.margin:.2g} apart"


def agreement(llm: LLM, tasks: Sequence[Task], own: Run, other: Run) -> Agreement:
    """Return how far the outputs of two engines agree.

    Benchmarks ignore EOS, but the tokens after this engine's EOS aren't compared.
    """
    shares, texts = list[float](), list[list[int]]()
    for task, ours, theirs in zip(tasks, own.tokens, other.tokens, strict=True):
        end = next((i for i, token in enumerate(ours, start=1) if token in llm.model_config.eos_token_ids), len(ours))
        place = next((i for i in range(end) if ours[i] != theirs[i]), end)
        shares.append(place / end)
        if place < end:
            texts.append(task.prompt + ours[:place])
    return Agreement(shares, max(margins(llm, texts)) if texts else 0.0)


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
    # Untouched memory has no physical pages yet, and reading it is too fast. These bytes are 0.01 in most dtypes.
    llm.llm_engine.kv_cache.blocks.view(torch.uint8).fill_(0x3C)
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
