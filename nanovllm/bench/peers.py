"""This engine next to others with the same weights: all of them take turns serving the same jobs.

At long contexts, this engine is measured alone: a decode step at a short context costs the same except for attention,
so the difference is the cost of attention.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any, NamedTuple

from ..engine import sequence
from ..engine.config import POOL_SIZES
from ..engine.sampling_params import SamplingParams
from ..llm import LLM
from .bench_options import Peers, whole_numbers
from .engine import Run, load_llm, serve
from .floor import kv_bytes, read_bandwidth, weight_bytes
from .harness import Spread, take_turns
from .peer import PeerProcess, PeerSpec, peer_settings, peer_specs
from .report import Report, has_random_weights, machine, report_of, settings
from .workload import Task, check_lengths, mixed_tasks, random_tasks

OWN = "nanovllm"
SHORT, NUM_STEPS = 16, 8  # tokens of a short context, and measured steps
DECODE_LENGTH, WARM_UP_TOKENS = 128, 8
MAX_IDLE_SHARE = 0.05  # of a core, while other engines compute
Serve = Callable[[Sequence[Task]], Run]


class Job(NamedTuple):
    """Tasks that are served at once. The speed of a decode job counts only its decode steps."""

    name: str
    tasks: list[Task]
    is_decode: bool

    def speed(self, run: Run) -> float:
        """Return tokens per second."""
        return run.decoded_per_second if self.is_decode else run.tokens_per_second

    def floor_bytes(self, llm: LLM) -> int:
        """Return the fewest bytes that the job can read. A prompt takes one step."""
        return self.num_steps * weight_bytes(llm) + kv_bytes(llm, self.tasks)

    @property
    def num_steps(self) -> int:
        return max(task.num_output_tokens for task in self.tasks) - self.is_decode


class Turn(NamedTuple):
    """A run of an engine, and the bytes per second that the machine read right before it."""

    run: Run
    bandwidth: float


def peers(engine: dict[str, Any], options: Peers) -> Report:
    """Race the engines on all jobs; then measure this engine's steps at long contexts."""
    specs = peer_specs(options.peer, options.transformers)
    lengths = whole_numbers("--contexts", options.contexts)
    llm = load_llm(engine)
    named = {name: settings(options)[name] for name in ("jobs", "rounds", *(("contexts",) if lengths else ()))}
    report = compare(llm, specs, make_jobs(llm, options.jobs), options.rounds, named)
    if lengths:
        del llm  # free its pool before the next engine takes one
        report["measured"][OWN] |= measure_contexts(engine, options.rounds, lengths, options.context_batch)
        report["says"].append(
            f"a context's attention: a step of {options.context_batch} sequences, minus the same step at {SHORT} tokens"
        )
    return report


def make_jobs(llm: LLM, text: str) -> list[Job]:
    """Return the jobs that --jobs names: `mixed`, and numbers of sequences that decode together."""
    names, vocab_size = [name.strip() for name in text.split(",") if name.strip()], llm.model_config.vocab_size
    jobs = [Job("mixed", mixed_tasks(vocab_size), is_decode=False)] if "mixed" in names else []
    for count in whole_numbers("--jobs", ",".join(name for name in names if name != "mixed")):
        tasks = random_tasks(vocab_size, count, DECODE_LENGTH, DECODE_LENGTH)
        jobs.append(Job(f"{count} sequence{'s' * (count > 1)}", tasks, is_decode=True))
    for job in jobs:
        check_lengths(job.tasks, llm.max_model_len)
    return jobs


def compare(llm: LLM, specs: Sequence[PeerSpec], jobs: Sequence[Job], rounds: int, named: dict[str, Any]) -> Report:
    """Load all engines, then serve each job with one engine at a time."""
    engines: dict[str, Serve] = {OWN: partial(serve, llm, detokenize=False)}
    versions, says = dict[str, str](), list[str]()
    with ExitStack() as stack:
        for spec in specs if jobs else ():
            tasks = [task for job in jobs for task in job.tasks]
            process = stack.enter_context(closing(PeerProcess(spec, peer_settings(llm, tasks))))
            engines[spec.name], versions[spec.name] = process.serve, process.version
        measured: dict[str, dict[str, Any]] = {name: {} for name in engines}
        for job in jobs:
            results = race(llm, engines, job, rounds)
            for name in engines:
                measured[name] |= numbers(llm, job, name, results)
            says += [f"{job.name}: {line}" for line in conclusions(llm, job, results)]
    return report_of("peers", named, machine(llm) | versions, measured, says)


def race(llm: LLM, engines: Mapping[str, Serve], job: Job, rounds: int) -> list[dict[str, Turn]]:
    """Return each engine's turn, a dict per round."""
    for warm_up in engines.values():
        warm_up([task.shortened(WARM_UP_TOKENS) for task in job.tasks])

    def turn(call: Serve) -> Turn:
        return Turn(bandwidth=read_bandwidth(llm), run=call(job.tasks))

    return take_turns({name: partial(turn, call) for name, call in engines.items()}, rounds, warm_ups=0, title=job.name)


def numbers(llm: LLM, job: Job, name: str, results: Sequence[Mapping[str, Turn]]) -> dict[str, Any]:
    """Return medians of the rounds, and the spread of speeds."""
    runs, floor = [each[name].run for each in results], job.floor_bytes(llm)
    seconds = [run.decode_seconds if job.is_decode else run.seconds for run in runs]
    shares = [floor / bandwidth_of(each) / each_seconds for each, each_seconds in zip(results, seconds, strict=True)]
    shown: dict[str, Any] = {
        f"{job.name}: tokens per second": Spread.of([job.speed(run) for run in runs])._asdict(),
        f"{job.name}: share of the floor": statistics.median(shares),
    }
    if job.is_decode:
        shown[f"{job.name}: step ms"] = 1000 * statistics.median(run.step_seconds for run in runs)
    if name != OWN:
        ratios = [job.speed(each[OWN].run) / job.speed(each[name].run) for each in results]
        shown[f"{job.name}: {OWN}'s speedup"] = Spread.of(ratios)._asdict()
    return shown


def bandwidth_of(turns: Mapping[str, Turn]) -> float:
    """Return a round's bandwidth. One read may fall into a slow moment, and make an engine look near its floor."""
    return statistics.median(turn.bandwidth for turn in turns.values())


def conclusions(llm: LLM, job: Job, results: Sequence[Mapping[str, Turn]]) -> Iterator[str]:
    """Yield notes: the floor, how far the tokens agree, and engines that were busy out of turn."""
    bandwidth = statistics.median(map(bandwidth_of, results))
    read = f"weights of {weight_bytes(llm) / 1e9:.3g} GB and {kv_bytes(llm, job.tasks) / 1e9:.3g} GB of keys and values"
    yield f"the floor is {job.num_steps} steps that read {read}, at {bandwidth / 1e9:.1f} GB/s"
    for name in results[0]:
        if name != OWN and not has_random_weights(llm):  # each engine makes its own random weights
            yield f"{name}: {agreement(llm, job.tasks, results[-1][OWN].run, results[-1][name].run)}"
        used = sum(each[name].run.idle_cpu_seconds for each in results)
        others = sum(turn.run.seconds for each in results for other, turn in each.items() if other != name)
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


def measure_contexts(engine: dict[str, Any], rounds: int, contexts: Sequence[int], batch_size: int) -> dict[str, Any]:
    """Return numbers by name. Raise ValueError if a context does not fit the model or the pool."""
    llm = load_llm(engine | needed(engine, max(contexts), batch_size))
    room = llm.llm_engine.kv_cache.num_blocks * llm.llm_engine.kv_cache.block_size
    for context in contexts:
        check_lengths([task_of(llm, context)], llm.max_model_len)
        if batch_size * (context + 1 + NUM_STEPS) > room:
            raise ValueError(f"{batch_size} contexts of {context} tokens do not fit in the pool of {room} slots")
    calls = {str(context): partial(step_seconds, llm, context, batch_size) for context in {SHORT, *contexts}}
    results = take_turns({**calls, "read": partial(read_bandwidth, llm)}, rounds, title="contexts")
    numbers: dict[str, Any] = {}
    for context in contexts:
        num_bytes = batch_size * (context + (NUM_STEPS + 1) / 2) * llm.llm_engine.kv_cache.bytes_per_token
        numbers |= numbers_of(context, num_bytes, results)
    return numbers


def needed(engine: dict[str, Any], context: int, batch_size: int) -> dict[str, Any]:
    """Return options for a pool with room for all sequences, unless its size is given, and for all in one step."""
    slots = batch_size * (context + 1 + NUM_STEPS + engine["block_size"])
    room = int(slots / (1 - engine["watermark"])) + 1  # with what admission leaves free
    pool = {} if any(engine[size] for size in POOL_SIZES) else {"kv_cache_tokens": room}
    seats = {name: max(engine[name], batch_size) for name in ("max_num_seqs", "max_num_batched_tokens")}
    return pool | seats | {"enable_prefix_caching": False}


def task_of(llm: LLM, context: int) -> Task:
    """Return a task that decodes NUM_STEPS tokens after `context` tokens."""
    return Task([1 + i % (llm.model_config.vocab_size - 1) for i in range(context)], 1 + NUM_STEPS)


def numbers_of(context: int, num_bytes: float, results: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return medians of the rounds. A share is None if a long step was ever faster than the short one.

    >>> rounds = [{"16": 0.010, "1000": 0.014, "read": 1e9}] * 3
    >>> numbers_of(1000, 2e6, rounds)["context 1,000: attention's share of the bandwidth"]
    0.5
    """
    steps = [each[str(context)] for each in results]
    attention = [each[str(context)] - each[str(SHORT)] for each in results]
    shares = [
        num_bytes / seconds / each["read"] for seconds, each in zip(attention, results, strict=True) if seconds > 0
    ]
    return {
        f"context {context:,}: step ms": 1000 * statistics.median(steps),
        f"context {context:,}: attention ms": 1000 * statistics.median(attention),
        f"context {context:,}: attention's share of the bandwidth": (
            statistics.median(shares) if len(shares) == len(results) else None
        ),
    }


def step_seconds(llm: LLM, context: int, batch_size: int) -> float:
    """Return the median decode step of a batch at this context."""
    with prompts_taken_as_computed(llm):
        run = serve(llm, [task_of(llm, context)] * batch_size, detokenize=False)
    return statistics.median(run.gaps[:NUM_STEPS])  # of the first sequence


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
