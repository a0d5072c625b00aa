"""A simulation of many engines behind a router: the real scheduler and block manager, without a model.

    measure a machine       steps of a real engine --> seconds = fixed + per_token * tokens + per_read * tokens read
    simulate N machines     arrivals --> router --> N LLMEngines, whose executor adds up those seconds

Time is virtual: a heap holds the next arrivals and the ends of steps, so N engines run at once in one thread.
"""

import heapq
import itertools
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from nanovllm.bench.bench_options import whole_numbers
from nanovllm.bench.engine import load_llm, serve
from nanovllm.bench.harness import percentiles
from nanovllm.bench.report import Report, machine, report_of, settings
from nanovllm.bench.workload import Task, around, arrivals, check_lengths, mixed_tasks, random_tokens
from nanovllm.cluster.routing import LeastQueue, PrefixRouter, RoundRobin, Router
from nanovllm.engine.executor import FinishedStep, Kernels, Scheduled
from nanovllm.engine.kv_cache import KVCache
from nanovllm.engine.prefix_cache import BlockHash, extend_block_hashes
from nanovllm.llm import LLM
from nanovllm.llm_engine import LLMEngine
from nanovllm.options.config import EngineConfig
from nanovllm.requests.outputs import RequestOutput
from nanovllm.requests.sampling_params import SamplingParams
from nanovllm.requests.tokens import NO_TOKEN, StepOutput
from stages.bench.options import Routing

ROUTERS: dict[str, Callable[[], Router[int]]] = {
    "round robin": RoundRobin,
    "least queue": LeastQueue,
    "prefix-aware": PrefixRouter,
}


# The cost of a step


def size_of(batch: Sequence[Scheduled], num_earlier: Callable[[Any], int]) -> tuple[int, int]:
    """Return how many tokens a batch computes, and how many tokens they attend to, themselves included.

    `num_earlier` returns the tokens of a sequence that were computed before.
    """
    reads = sum(count * num_earlier(seq) + count * (count + 1) // 2 for seq, count in batch)
    return sum(count for _, count in batch), reads


@dataclass(frozen=True)
class StepCost:
    """The seconds of a step, as a linear model."""

    fixed: float
    per_token: float  # computed
    per_read: float  # a computed token attends to one token
    error: float = 0.0  # median of |model - measured| / measured

    def seconds(self, num_tokens: int, num_reads: int) -> float:
        """Return the seconds of a step.

        >>> StepCost(fixed=0.5, per_token=0.25, per_read=0.125).seconds(4, 8)
        2.5
        """
        return self.fixed + self.per_token * num_tokens + self.per_read * num_reads

    @classmethod
    def fit(cls, steps: Sequence[tuple[int, int, float]]) -> "StepCost":
        """Return the model with the least squares of relative errors, without negative parts.

        `steps` are tokens, reads and seconds. Steps of one size (a power of two) count together as one, since a run
        has few prompts and many decode steps.

        >>> cost = StepCost.fit([(n, reads, 2.0 + 3 * n) for n, reads in ((1, 1), (1, 9), (2, 5), (4, 20), (5, 15))])
        >>> cost.seconds(10, 50)
        32.0
        """
        rows = torch.tensor([[1.0, tokens, reads] for tokens, reads, _ in steps], dtype=torch.float64)
        seconds = torch.tensor([[each[2]] for each in steps], dtype=torch.float64)
        counts = Counter(tokens.bit_length() for tokens, _, _ in steps)
        shares = torch.tensor([[counts[tokens.bit_length()] ** -0.5] for tokens, _, _ in steps], dtype=torch.float64)
        found, kept = torch.zeros(3, 1, dtype=torch.float64), [0, 1, 2]
        while (solution := torch.linalg.lstsq(shares * rows[:, kept] / seconds, shares).solution).min() < 0:
            kept.pop(int(solution.argmin()))
        found[kept] = solution
        error = ((rows @ found - seconds).abs() / seconds).median().item()
        fixed, per_token, per_read = (round(each, 12) for each in found.flatten().tolist())
        return cls(fixed, per_token, per_read, error)

    def __str__(self) -> str:
        parts = f"{1e3 * self.fixed:.3g} ms + {1e6 * self.per_token:.3g} us a token"
        return f"{parts} + {1e9 * self.per_read:.3g} ns for each token that it reads (median error {self.error:.0%})"


class StepTimer:
    """An observer that times steps."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, float]] = []  # tokens, reads, seconds
        self._start, self._size = 0.0, (0, 0)

    def on_begin(self) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_step(self, batch: Sequence[Scheduled], updated: object) -> None:
        """Take the size of the step, whose tokens count as computed by now."""
        counts = {seq: count for seq, count in batch}
        self._size = size_of(batch, lambda seq: seq.num_computed_tokens - counts[seq])

    def on_end(self, error: BaseException | None) -> None:
        """Stop the clock."""
        self.steps.append((*self._size, time.perf_counter() - self._start))


# A simulated engine


class SimulatedExecutor:
    """An executor without a model, which adds up the seconds that its steps would take."""

    def __init__(self, cost: StepCost) -> None:
        self.num_steps = self.num_tokens = 0
        self.seconds = 0.0
        self._cost = cost

    def launch(self, batch: list[Scheduled], num_decodes: int = 0) -> FinishedStep:
        """Return the same token for each sequence whose prompt is complete."""
        num_tokens, num_reads = size_of(batch, lambda seq: seq.num_launched_tokens)
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.seconds += self._cost.seconds(num_tokens, num_reads)
        token_ids = [0 if count == seq.num_uncomputed_tokens else NO_TOKEN for seq, count in batch]
        return FinishedStep(StepOutput(token_ids, [0.0] * len(batch)))

    def next_logits(self, batch: list[Scheduled]) -> torch.Tensor:
        """Raise ValueError."""
        raise ValueError("a simulated engine has no logits")


class SimulatedEngine:
    """An LLMEngine in virtual time."""

    def __init__(self, config: EngineConfig, cost: StepCost) -> None:
        self.executor = SimulatedExecutor(cost)

        def choose(kv_cache: KVCache) -> tuple[SimulatedExecutor, Kernels]:
            return self.executor, Kernels("the engine is simulated")

        self.engine = LLMEngine(config, choose_executor=choose)
        self.is_running = False

    def step(self) -> tuple[float, list[RequestOutput]]:
        """Run a step. Return the seconds that it takes, and its outputs, which come at its end."""
        before = self.executor.seconds
        outputs = self.engine.step()
        return self.executor.seconds - before, outputs


# The simulation


@dataclass(frozen=True)
class Arrival:
    """A request, and the time at which it arrives."""

    seconds: float
    task: Task
    prefix: int  # its number
    hashes: list[BlockHash]  # of the prompt's blocks


@dataclass
class Outcome:
    """The results of a router."""

    first_tokens: list[float] = field(default_factory=list)  # seconds from arrival
    seconds: float = 0.0  # until the last request has ended
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    peak_tokens: float = 0.0  # slots that an engine's sequences held, the mean of all engines
    copies: float = 0.0  # engines that were sent a prefix, the mean of all prefixes

    def numbers(self, bytes_per_token: int) -> dict[str, Any]:
        """Return the numbers for a report."""
        return {
            "hit_rate": self.num_cached_tokens / self.num_prompt_tokens,
            "ttft_ms": percentiles(self.first_tokens),
            "peak_mb": self.peak_tokens * bytes_per_token / 1e6,
            "copies": self.copies,
        }


def simulate(
    requests: Sequence[Arrival], engines: Sequence[SimulatedEngine], router: Router[int], note: Callable[[], object]
) -> Outcome:
    """Serve requests, sorted by arrival, and call `note` whenever one has ended."""
    outcome, order = Outcome(), itertools.count()  # the order breaks ties
    loads = dict.fromkeys(range(len(engines)), 0)
    arrived: dict[str, float] = {}  # requests without a token
    sent: dict[int, set[int]] = {}  # the engines that were sent each prefix
    events: list[tuple[float, int, Arrival | tuple[int, list[RequestOutput]]]]
    events = [(each.seconds, next(order), each) for each in requests]  # sorted, so it is a heap
    while events:
        now, number, event = heapq.heappop(events)
        if isinstance(event, Arrival):
            index = router.choose(event.hashes, loads)
            loads[index] += 1
            sent.setdefault(event.prefix, set()).add(index)
            params = SamplingParams(temperature=0.0, max_tokens=event.task.num_output_tokens, ignore_eos=True)
            engines[index].engine.add_request(str(number), event.task.prompt, params)
            arrived[str(number)] = now
            if engines[index].is_running:
                continue
        else:
            index, outputs = event
            for output in outputs:
                if output.request_id in arrived:
                    outcome.first_tokens.append(now - arrived.pop(output.request_id))
                if output.finished:
                    loads[index] -= 1
                    outcome.num_prompt_tokens += len(output.prompt_token_ids)
                    outcome.num_cached_tokens += output.num_cached_tokens
                    note()
        each = engines[index]
        each.is_running = each.engine.has_unfinished_requests()
        if each.is_running:
            seconds, outputs = each.step()
            heapq.heappush(events, (now + seconds, next(order), (index, outputs)))
        outcome.seconds = now
    outcome.peak_tokens = statistics.fmean(each.engine.kv_cache_manager.peak.held for each in engines)
    outcome.copies = statistics.fmean(map(len, sent.values()))
    return outcome


def trace(
    options: Routing, num_engines: int, rate: float, *, seed: int, vocab_size: int, block_size: int
) -> list[Arrival]:
    """Return the requests for a number of engines, `rate` for each one in a second on average."""
    rng, count = random.Random(seed), num_engines * options.num_requests
    numbers = range(num_engines * options.num_prefixes)
    prefixes = [random_tokens(rng, vocab_size, around(rng, options.prefix_len, options.spread)) for _ in numbers]
    chosen = rng.choices(numbers, weights=[1 / (number + 1) for number in numbers], k=count)
    requests = []
    for prefix, seconds in zip(chosen, arrivals(count, num_engines * rate, seed), strict=True):
        prompt = prefixes[prefix] + random_tokens(rng, vocab_size, around(rng, options.input_len, options.spread))
        hashes: list[BlockHash] = []
        extend_block_hashes(hashes, prompt, block_size)
        requests.append(Arrival(seconds, Task(prompt, around(rng, options.output_len, options.spread)), prefix, hashes))
    return requests


# The benchmark


def measure_cost(llm: LLM) -> StepCost:
    """Return the cost of a step on this machine, from steps of all sizes."""
    timer, vocab_size = StepTimer(), llm.model_config.vocab_size
    longest = min(256, llm.max_model_len // 2, llm.llm_engine.kv_cache.num_blocks * llm.config.block_size // 4)
    together = mixed_tasks(vocab_size, 12, low=1, high=longest)
    alone = [Task(random_tokens(random.Random(0), vocab_size, 1 << power), 8) for power in range(longest.bit_length())]
    serve(llm, alone)  # warms up
    llm.llm_engine.observers.append(timer)
    for tasks in (together, *([task] for task in alone)):
        serve(llm, tasks)
    return StepCost.fit(timer.steps)


def simulated_config(config: EngineConfig) -> EngineConfig:
    """Return the options of a simulated engine, whose pool is as long as a real one's, and takes almost no memory."""
    ones = "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
    shape = {**dict.fromkeys(ones, 1), "head_dim": 2, "hidden_size": 2}
    where: dict[str, Any] = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "quantization": None}
    plain: dict[str, Any] = {"offload_policy": "recompute", "async_scheduling": False}
    return replace(config, **where, **plain, hf_overrides={**(config.hf_overrides or {}), **shape})


def routing(engine: dict[str, Any], options: Routing) -> Report:
    """Compare the routers. Raise ValueError if a prompt and its output could be too long for an engine."""
    numbers = whole_numbers("--engines", options.engines)
    llm = load_llm(engine)
    longest = round((options.prefix_len + options.input_len + options.output_len) * (1 + options.spread)) + 1
    check_lengths([Task([0] * longest, 0)], min(llm.max_model_len, llm.config.kv_cache_tokens or longest))
    cost, config = measure_cost(llm), simulated_config(llm.config)
    where, bytes_per_token = machine(llm), llm.llm_engine.kv_cache.bytes_per_token
    vocab_size, block_size = llm.model_config.vocab_size, config.block_size
    requests = partial(trace, options, seed=config.seed, vocab_size=vocab_size, block_size=block_size)
    del llm

    def run(num_engines: int, router: Router[int], rate: float, **changes: Any) -> Outcome:
        engines = [SimulatedEngine(replace(config, **changes), cost) for _ in range(num_engines)]
        return simulate(requests(num_engines, rate), engines, router, bar.update)

    total = options.num_requests * (1 + len(ROUTERS) * sum(numbers))
    measured: dict[str, dict[str, Any]] = {name: {} for name in ROUTERS}
    with tqdm(total=total, desc="routing", unit=" requests", disable=not sys.stderr.isatty(), leave=False) as bar:
        alone = run(1, LeastQueue(), math.inf, enable_prefix_caching=False)
        rate = options.load * options.num_requests / alone.seconds
        points = []
        for number, (name, build) in itertools.product(numbers, ROUTERS.items()):
            outcome = run(number, build(), rate)
            points.append({"engines": number, "router": name} | outcome.numbers(bytes_per_token))
            measured[name] |= {f"{number}: {key}": value for key, value in outcome.numbers(bytes_per_token).items()}
    says = [
        "number of engines: figure; times in ms: p50 / p90 / p99; hit rate: share of prompt tokens that were cached",
        f"a step takes {cost}",
        f"{rate:.3g} requests/s for each engine, which serves {rate / options.load:.3g} without a cache",
    ]
    more = {"cost": asdict(cost), "points": points, "request_rate": rate}
    return report_of("routing", settings(options) | {"seed": config.seed}, where, measured, says, **more)
