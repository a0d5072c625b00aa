"""Helpers of stage 7's notebook: load or recompute, a pool that is too small, documents in turn, a slow host."""

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from nanovllm.bench.workload import Task, random_tokens
from notebooks.helpers import pictures
from notebooks.helpers.pictures import ACCENT, GREY, INK, PALE, PAPER, USED, Line
from stages import s7_cpu_offload as s7
from stages.bench import offload
from stages.bench.engines import without_model
from stages.bench.models import STORYTELLER
from stages.bench.racing import computed_twice, sampling_params
from stages.bench.workloads import even_prompt
from stages.s7_cpu_offload.block_manager import BlockManager
from stages.s7_cpu_offload.cost_model import CostModel
from stages.s7_cpu_offload.host_tier import HostTier
from stages.s7_cpu_offload.scheduler import Scheduler

BLOCK = offload.BLOCK_SIZE


# ---- load or recompute


class Asker:
    """An engine whose pool has room for one prompt of `num_tokens` tokens, and one token more.

    A call serves the next prompt up to its first token. With "load" two prompts take turns, so each comes back from the
    host. With "recompute" each prompt is new.
    """

    def __init__(self, folder: Path, num_tokens: int, policy: str) -> None:
        options = {"kv_cache_tokens": num_tokens + BLOCK, "kv_offloading_tokens": 4 * num_tokens + 4 * BLOCK}
        llm = s7.LLM(folder, dtype="float32", max_num_batched_tokens=8192, offload_policy=policy, **options)
        rng, self.engine, self._number = random.Random(0), llm.llm_engine, 0
        made = (random_tokens(rng, 4096, num_tokens + 1) for _ in itertools.count())
        self._prompts = itertools.cycle([next(made), next(made)]) if policy == "load" else made
        for _ in range(2):
            self()

    def __call__(self) -> None:
        self._number += 1
        self.engine.add_request(str(self._number), next(self._prompts), s7.SamplingParams(max_tokens=1))
        while self.engine.has_unfinished_requests():
            self.engine.step()


class Machine(NamedTuple):
    """A machine and a model, with the speeds that decide between load and recompute."""

    name: str
    bytes_per_second: float  # of the link, one way
    tokens_per_second: float  # of a prefill
    bytes_per_token: int

    @property
    def ratio(self) -> float:
        """Return the time to recompute a token over the time to load it. Above 1, loading wins.

        >>> Machine("", bytes_per_second=1e9, tokens_per_second=1000, bytes_per_token=50_000).ratio
        20.0
        """
        return self.bytes_per_second / self.bytes_per_token / self.tokens_per_second

    @property
    def prefers_load(self) -> bool:
        """Return the decision of stage 7's policy "auto"."""
        model = CostModel(self.bytes_per_second, self.bytes_per_second, self.tokens_per_second)
        return model.prefers_load(self.bytes_per_token)


GPU = Machine("8B on a GPU", 64e9, 25_000, 2 * 32 * 8 * 128 * 2)  # worked out from two round numbers, not measured
SLOW_LINK = GPU._replace(name="with a link of 2 GB/s", bytes_per_second=2e9)


# ---- a pool that is too small


class Counts(NamedTuple):
    """The counts of a run."""

    steps: int
    preemptions: int
    computed_twice: int
    blocks_stored: int
    blocks_loaded: int


def too_small(policy: str, share: float) -> tuple[Any, list[Task]]:
    """Return an engine without a model and its requests. The pool has room for a `share` of all their tokens.

    `policy` is one of stage 7's, or "s6".
    """
    requests, _ = offload.workload(vocab_size=4096)
    pool = int(share * sum(request.num_tokens for request in requests))
    engine = without_model(offload.stage_of(policy), model=str(STORYTELLER), **offload.options_of(policy, pool))
    for number, request in enumerate(requests):
        params = sampling_params(offload.stage_of(policy), request)
        engine.add_request(str(number), request.prompt, params)
    return engine, requests


def count(policy: str, share: float) -> Counts:
    """Serve the requests, and return the counts."""
    engine, requests = too_small(policy, share)
    while engine.has_unfinished_requests():
        engine.step()
    twice = computed_twice(offload.stage_of(policy), engine.model_runner.num_tokens, requests)
    tier = getattr(engine, "host_tier", None)  # stage 6 has none
    moved = (tier.num_blocks_stored, tier.num_blocks_loaded) if tier else (0, 0)
    return Counts(engine.model_runner.num_steps, engine.scheduler.num_preemptions, twice, *moved)


PLACES = {"running": USED, "idle on the device": "#b9cbd8", "on the host": ACCENT, "nowhere": PAPER}


def lives(policy: str, share: float) -> list[dict[int, str]]:
    """Return the place of each request's computed tokens after each step: a key of PLACES."""
    engine, _ = too_small(policy, share)
    moments = []
    while engine.has_unfinished_requests():
        engine.step()
        here = {int(seq.request_id): "running" for seq in engine.scheduler.running}
        for seq in engine.scheduler.waiting:
            here[int(seq.request_id)] = place_of(engine.kv_cache_manager, seq)
        moments.append(here)
    return moments


def place_of(manager: Any, seq: Any) -> str:
    """Return the place of the blocks that a waiting sequence would hit."""
    hits = manager.find_hits(seq)
    if None in hits:
        return "on the host"
    return "idle on the device" if hits else "nowhere"


# ---- documents that take turns


def hits_in_turn(blocks: int, host_blocks: int, num_documents: int = 6, length: int = 30) -> tuple[float, float]:
    """Return the shares of blocks found on the device and on the host.

    Documents of `length` blocks take turns four times, each time with a new question.
    """
    options = {"kv_cache_tokens": BLOCK * blocks, "kv_offloading_tokens": BLOCK * host_blocks}
    engine = without_model("s7", model=str(STORYTELLER), block_size=BLOCK, **options)
    for turn, number in itertools.product(range(4), range(num_documents)):
        document = [10 * number + 3 + i % 7 for i in range(length * BLOCK)]
        engine.add_request(f"{turn}-{number}", [*document, *[500 + turn] * 8], s7.SamplingParams(max_tokens=1))
        while engine.has_unfinished_requests():
            engine.step()
    queries = 4 * num_documents * length
    hits, loaded = engine.kv_cache_manager.prefix_cache_stats.hits // BLOCK, engine.host_tier.num_blocks_loaded
    return (hits - loaded) / queries, loaded / queries


# ---- a host that is slow on purpose


class Clock:
    """A clock that counts steps of the model. Waiting advances it."""

    now = 0


class SlowEvent:
    """A stand-in for a load's torch.cuda.Event, complete at time `due`."""

    def __init__(self, clock: Clock, due: int) -> None:
        self._clock, self._due = clock, due

    def query(self) -> bool:
        return self._clock.now >= self._due

    def synchronize(self) -> None:
        self._clock.now = max(self._clock.now, self._due)


class SlowHost(HostTier):
    """A host whose loads take `num_steps` steps of the model. Without overlap, the engine waits for each."""

    def __init__(self, device_blocks: Any, num_blocks: int, observer: Any, num_steps: int, overlaps: bool) -> None:
        super().__init__(device_blocks, num_blocks, observer)
        self.clock, self.spans = Clock(), list[tuple[int, int]]()  # the start and end of each load
        self._num_steps, self._overlaps = num_steps, overlaps

    def load(self, copies: list[Any]) -> None:
        super().load(copies)
        begun, due = self.clock.now, self.clock.now + self._num_steps
        self.spans.append((begun, due))
        event: Any = SlowEvent(self.clock, due)
        self.loads[-1].event = event
        if not self._overlaps:
            event.synchronize()


class Lanes(NamedTuple):
    """The work of two streams over time, in steps of the model."""

    steps: list[tuple[int, tuple[str, ...]]]  # the start of each, and its requests
    loads: list[tuple[int, int]]

    @property
    def end(self) -> int:
        return self.steps[-1][0] + 1

    def tokens_during_loads(self) -> int:
        """Return the number of tokens computed during loads."""
        return sum(len(batch) for at, batch in self.steps if any(start <= at < end for start, end in self.loads))


def two_streams(num_steps: int, overlaps: bool) -> Lanes:
    """Run A and B, which write stories. After three steps C arrives, whose prompt is on the host.

    A load takes `num_steps`.
    """
    engine = engine_with_slow_host(num_steps, overlaps)
    document, another = even_prompt(20 * BLOCK + 1), even_prompt(39 * BLOCK)[::-1]

    def add(name: str, prompt: list[int], num_output_tokens: int) -> None:
        engine.add_request(name, prompt, sampling_params("s7", Task(prompt, num_output_tokens)))

    for name, prompt in (("first", document), ("then", another)):  # the second evicts the first
        add(name, prompt, 1)
        while engine.has_unfinished_requests():
            engine.step()
    lanes = record_lanes(engine)
    for name in "AB":
        add(name, [7 + ord(name)] * 4, 14)
    while engine.has_unfinished_requests():
        if len(lanes.steps) == 3:
            add("C", document, 4)
        engine.step()
    return lanes


def engine_with_slow_host(num_steps: int, overlaps: bool) -> Any:
    """Return stage 7's engine with a slow host."""
    engine = without_model("s7", model=str(STORYTELLER), kv_cache_tokens=40 * BLOCK, block_size=BLOCK)
    engine.host_tier = SlowHost(engine.kv_cache.blocks, 64, engine.observer, num_steps, overlaps)
    engine.kv_cache_manager = BlockManager(40, BLOCK, True, engine.host_tier, engine.observer)
    engine.scheduler = Scheduler(engine.config, engine.kv_cache_manager, engine.observer)
    return engine


def record_lanes(engine: Any) -> Lanes:
    """Return lanes that the engine's next steps and loads fill in. Each step advances the clock by one."""
    clock, lanes, run = engine.host_tier.clock, Lanes([], engine.host_tier.spans), engine.model_runner.run

    def record(batch: Any) -> Any:
        lanes.steps.append((clock.now, tuple(seq.request_id for seq, _ in batch)))
        clock.now += 1
        return run(batch)

    engine.model_runner.run, clock.now = record, 0
    return lanes


# ---- pictures


def two_ways(ax: Axes, lengths: Sequence[int], loaded: Sequence[float], computed: Sequence[float]) -> None:
    """Draw the milliseconds of both ways for each length, with their ratio between them."""
    ax.vlines(lengths, loaded, computed, color=GREY, linewidth=1, linestyle=":")
    both = (
        Line(lengths, computed, "recompute", ACCENT, (8, 0), "s--"),
        Line(lengths, loaded, "load", USED, (8, 0), "o-"),
    )
    pictures.lines(ax, both, "tokens", "ms to the first token", "xy")
    for n, a, b in zip(lengths, loaded, computed, strict=True):
        text = f"{b / a:.1f} times" if b < 10 * a else f"{b / a:.0f} times"
        at, shift = ((n, b), (-2, 8)) if b < 2.5 * a else ((n, (a * b) ** 0.5), (5, 0))
        pictures.label(ax, text, at, shift, INK, ha="left")
    ax.set(xticks=lengths, yticks=[1, 10, 100, 1000], yticklabels=["1", "10", "100", "1,000"])
    ax.set(ylim=(0.7 * min(loaded), 1.6 * max(computed)), xlim=(0.8 * lengths[0], 2.2 * lengths[-1]))


def map_of_winners(ax: Axes, machines: Sequence[Machine], shifts: Mapping[str, tuple[float, float]]) -> None:
    """Draw the speed of a link, one way, against the speed of a prefill, both in tokens per second.

    `shifts` moves the names of machines, in points of type.
    """
    low, high, bottom, top = 1e3, 1e8, 1e2, 1e6
    even = [(low, low), (top, top)]
    pictures.polygons(ax, [[(low, bottom), (high, bottom), (high, top), *reversed(even)]], PALE)
    ax.plot(*zip(*even, strict=True), color=INK, linewidth=1.2)
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, top))
    ax.set(xlabel="link, one way: tokens whose keys and values it moves per second", ylabel="prefill, tokens/s")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
    pictures.thousands(ax.xaxis, ax.yaxis)
    ax.text(2e3, 2.5e5, "recompute is faster", color=INK)
    ax.text(7e7, 1.6e2, "load is faster", color=INK, ha="right")
    for machine in machines:
        place = machine.bytes_per_second / machine.bytes_per_token, machine.tokens_per_second
        ax.plot(*place, "o", color=USED, markersize=6, markeredgecolor=PAPER)
        pictures.label(ax, machine.name, place, shifts.get(machine.name, (7, 0)), USED)


def draw_places(ax: Axes, moments: Sequence[Mapping[int, str]]) -> None:
    """Draw a row for each request, in order of arrival from the top, against the step."""
    boxes: dict[str, list] = {place: [] for place in PLACES}
    num_requests = 1 + max(max(moment, default=0) for moment in moments)
    for number in range(num_requests):
        places = [moment.get(number, "") for moment in moments]
        for place, start, length in stretches(places):
            thin = 0.0 if place == "running" else 0.2
            boxes[place].append(pictures.box(start, length, number + 0.08 + thin, 0.84 - 2 * thin))
    for place, color in PLACES.items():
        pictures.polygons(ax, boxes[place], color, edge=INK if color == PAPER else "none", width=0.7)
    ax.set(xlim=(0, len(moments)), ylim=(num_requests, 0), yticks=[], ylabel="requests, by arrival")
    pictures.thousands(ax.xaxis)


def stretches(places: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return (place, start, length) of each stretch without a change. Empty ones are left out.

    >>> stretches(["waiting", "running", "running", "", ""])
    [('waiting', 0, 1), ('running', 1, 2)]
    """
    made, start = [], 0
    for place, group in itertools.groupby(places):
        made.append((place, start, len(list(group))))
        start += made[-1][2]
    return [stretch for stretch in made if stretch[0]]


def draw_lanes(ax: Axes, lanes: Lanes, title: str) -> None:
    """Draw the stream of steps, with the requests of each step, above the stream of copies."""
    for at, batch in lanes.steps:
        color = ACCENT if "C" in batch else USED
        pictures.polygons(ax, [pictures.box(at + 0.03, 0.94, 1.1, 0.8)], color)
        ax.text(at + 0.5, 1.5, " ".join(batch), ha="center", va="center", fontsize=7.5, color=PAPER)
    for start, end in lanes.loads:
        pictures.polygons(ax, [pictures.box(start + 0.03, end - start - 0.06, 0.1, 0.8)], GREY)
        ax.text((start + end) / 2, 0.5, "C's blocks arrive", ha="center", va="center", fontsize=7.5, color=PAPER)
    ax.set(ylim=(0, 2), yticks=[0.5, 1.5], yticklabels=["copies", "steps"], title=title)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
