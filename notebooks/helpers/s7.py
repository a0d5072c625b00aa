"""Helpers of stage 7's notebook: prompts whose blocks are on the host, requests that take turns, a host that is slow on
purpose; a map of two speeds, who is where, two streams side by side.
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from nanovllm.bench.workload import Task, random_tokens
from notebooks.helpers import pictures
from notebooks.helpers.pictures import ACCENT, GREY, INK, LIGHT, PALE, PAPER, USED, Line
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


# ---- two ways back


class Asker:
    """An idle engine, in whose pool one prompt of so many tokens (and one more) fits at a time. A call serves the next
    prompt up to its first token: with "load" two prompts take turns, and each comes back from the host; with
    "recompute" each is new.
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
    """The speeds that decide between load and recompute."""

    name: str
    bytes_per_second: float  # of the link, one way
    tokens_per_second: float  # of a prefill
    bytes_per_token: int

    @property
    def ratio(self) -> float:
        """Return how many times as long recompute takes as a load. Above 1 the host wins.

        >>> Machine("", bytes_per_second=1e9, tokens_per_second=1000, bytes_per_token=50_000).ratio
        20.0
        """
        return self.bytes_per_second / self.bytes_per_token / self.tokens_per_second

    @property
    def prefers_load(self) -> bool:
        """Return the decision of stage 7's "auto" there."""
        model = CostModel(self.bytes_per_second, self.bytes_per_second, self.tokens_per_second)
        return model.prefers_load(self.bytes_per_token)


# ---- a pool that is too small


class Counts(NamedTuple):
    """A run in numbers."""

    steps: int
    preemptions: int
    computed_twice: int
    blocks_stored: int
    blocks_loaded: int


def too_small(policy: str, share: float) -> tuple[Any, list[Task]]:
    """An engine without a model whose pool is a share of what the requests hold in the end, and these requests. A
    policy is one of stage 7's, or "s6".
    """
    requests, _ = offload.workload(vocab_size=4096)
    pool = int(share * sum(request.num_tokens for request in requests))
    engine = without_model(offload.stage_of(policy), model=str(STORYTELLER), **offload.options_of(policy, pool))
    for number, request in enumerate(requests):
        params = sampling_params(offload.stage_of(policy), request)
        engine.add_request(str(number), request.prompt, params)
    return engine, requests


def count(policy: str, share: float) -> Counts:
    engine, requests = too_small(policy, share)
    while engine.has_unfinished_requests():
        engine.step()
    twice = computed_twice(offload.stage_of(policy), engine.model_runner.num_tokens, requests)
    tier = getattr(engine, "host_tier", None)  # stage 6 has none
    moved = (tier.num_blocks_stored, tier.num_blocks_loaded) if tier else (0, 0)
    return Counts(engine.model_runner.num_steps, engine.scheduler.num_preemptions, twice, *moved)


PLACES = {"runs": USED, "waits, on the device": LIGHT, "waits, on the host": ACCENT, "waits, nowhere": PALE}


def lives(policy: str, share: float) -> list[dict[int, str]]:
    """After each step, where the computed part of each request is that has not ended: a key of PLACES."""
    engine, _ = too_small(policy, share)
    moments = []
    while engine.has_unfinished_requests():
        engine.step()
        here = {int(seq.request_id): "runs" for seq in engine.scheduler.running}
        for seq in engine.scheduler.waiting:
            here[int(seq.request_id)] = place_of(engine.kv_cache_manager, seq)
        moments.append(here)
    return moments


def place_of(manager: Any, seq: Any) -> str:
    """Return where the blocks are that a waiting sequence would hit."""
    hits = manager.find_hits(seq)
    if None in hits:
        return "waits, on the host"
    return "waits, on the device" if hits else "waits, nowhere"


# ---- documents in turn


def found_in_turn(blocks: int, host_blocks: int, num_documents: int = 6, length: int = 30) -> tuple[float, float]:
    """Documents of `length` blocks are asked about in turn, four times: shares of their blocks that are found on the
    device, and on the host.
    """
    options = {"kv_cache_tokens": BLOCK * blocks, "kv_offloading_tokens": BLOCK * host_blocks}
    engine = without_model("s7", model=str(STORYTELLER), block_size=BLOCK, **options)
    for turn, number in itertools.product(range(4), range(num_documents)):
        document = [10 * number + 3 + i % 7 for i in range(length * BLOCK)]
        engine.add_request(f"{turn}-{number}", [*document, *[500 + turn] * 8], s7.SamplingParams(max_tokens=1))
        while engine.has_unfinished_requests():
            engine.step()
    asked = 4 * num_documents * length
    found, loaded = engine.kv_cache_manager.prefix_cache_stats.hits // BLOCK, engine.host_tier.num_blocks_loaded
    return (found - loaded) / asked, loaded / asked


# ---- a host that is slow on purpose


class Clock:
    """Counts steps of the model; a wait moves it on."""

    def __init__(self) -> None:
        self.now = 0


class SlowEvent:
    """A stand-in for a load's torch.cuda.Event that comes at a moment of the clock."""

    def __init__(self, clock: Clock, due: int) -> None:
        self._clock, self._due = clock, due

    def query(self) -> bool:
        return self._clock.now >= self._due

    def synchronize(self) -> None:
        self._clock.now = max(self._clock.now, self._due)


class SlowHost(HostTier):
    """A load takes so many steps of the model. Without overlap the engine waits for it."""

    def __init__(self, device_blocks: Any, num_blocks: int, observer: Any, num_steps: int, overlaps: bool) -> None:
        super().__init__(device_blocks, num_blocks, observer)
        self.clock, self.spans = Clock(), list[tuple[int, int]]()  # of each load, from when to when
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

    steps: list[tuple[int, tuple[str, ...]]]  # when each begins, and whose tokens it computes
    loads: list[tuple[int, int]]

    @property
    def end(self) -> int:
        return self.steps[-1][0] + 1

    def tokens_during_loads(self) -> int:
        """Return the tokens that all sequences computed while loads were under way."""
        return sum(len(who) for at, who in self.steps if any(start <= at < end for start, end in self.loads))


def two_streams(num_steps: int, overlaps: bool) -> Lanes:
    """A and B write stories. After three steps C asks about a document, which only the host has; a load takes
    `num_steps`.
    """
    engine = engine_with_slow_host(num_steps, overlaps)
    document, another = even_prompt(20 * BLOCK + 1), even_prompt(39 * BLOCK)[::-1]

    def add(name: str, prompt: list[int], num_output_tokens: int) -> None:
        engine.add_request(name, prompt, sampling_params("s7", Task(prompt, num_output_tokens)))

    for name, prompt in (("first", document), ("then", another)):  # the second one evicts the first
        add(name, prompt, 1)
        while engine.has_unfinished_requests():
            engine.step()
    lanes = watched_lanes(engine)
    for name in "AB":
        add(name, [7 + ord(name)] * 4, 14)
    while engine.has_unfinished_requests():
        if len(lanes.steps) == 3:
            add("C", document, 4)
        engine.step()
    return lanes


def engine_with_slow_host(num_steps: int, overlaps: bool) -> Any:
    """Return stage 7's engine, whose host takes `num_steps` for a load."""
    engine = without_model("s7", model=str(STORYTELLER), kv_cache_tokens=40 * BLOCK, block_size=BLOCK)
    engine.host_tier = SlowHost(engine.kv_cache.blocks, 64, engine.observer, num_steps, overlaps)
    engine.kv_cache_manager = BlockManager(40, BLOCK, True, engine.host_tier, engine.observer)
    engine.scheduler = Scheduler(engine.config, engine.kv_cache_manager, engine.observer)
    return engine


def watched_lanes(engine: Any) -> Lanes:
    """Return lanes that the engine's steps and loads fill in from step 0 on. Each step moves the clock by one."""
    clock, lanes, run = engine.host_tier.clock, Lanes([], engine.host_tier.spans), engine.model_runner.run

    def noted(batch: Any) -> Any:
        lanes.steps.append((clock.now, tuple(seq.request_id for seq, _ in batch)))
        clock.now += 1
        return run(batch)

    engine.model_runner.run, clock.now = noted, 0
    return lanes


# ---- pictures


def two_ways(ax: Axes, lengths: Sequence[int], loaded: Sequence[float], computed: Sequence[float]) -> None:
    """Milliseconds for each length, both ways, and between them how many times as long the longer takes."""
    ax.vlines(lengths, loaded, computed, color=GREY, linewidth=1, linestyle=":")
    both = Line(lengths, computed, "compute", ACCENT, (8, 0), "s--"), Line(lengths, loaded, "load", USED, (8, 0), "o-")
    pictures.lines(ax, both, "tokens", "ms to the first token", "xy")
    for n, a, b in zip(lengths, loaded, computed, strict=True):
        text = f"{b / a:.1f} times" if b < 10 * a else f"{b / a:.0f} times"
        pictures.label(ax, text, (n, (a * b) ** 0.5), (5, 0), INK)
    ax.set(xticks=lengths, yticks=[1, 10, 100, 1000], yticklabels=["1", "10", "100", "1,000"])
    ax.set(ylim=(0.7 * min(loaded), 1.6 * max(computed)), xlim=(0.8 * lengths[0], 2.2 * lengths[-1]))


def map_of_winners(ax: Axes, machines: Sequence[Machine], shifts: Mapping[str, tuple[float, float]]) -> None:
    """Draw the speed of a link, one way, against the speed of a prefill, both in tokens per second.

    Models with keys and values of different sizes share this map. `shifts`: where a machine's name stands.
    """
    low, high, bottom, top = 1e3, 1e8, 1e2, 1e6
    even = [(low, low), (top, top)]
    pictures.polygons(ax, [[(low, bottom), (high, bottom), (high, top), *reversed(even)]], PALE)
    ax.plot(*zip(*even, strict=True), color=INK, linewidth=1.2)
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, top))
    ax.set(xlabel="link: keys and values of so many tokens a second, one way", ylabel="prefill, tokens a second")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
    pictures.thousands(ax.xaxis, ax.yaxis)
    ax.text(2e3, 2.5e5, "recompute is quicker", color=INK)
    ax.text(7e7, 1.6e2, "the host is quicker", color=INK, ha="right")
    for machine in machines:
        place = machine.bytes_per_second / machine.bytes_per_token, machine.tokens_per_second
        ax.plot(*place, "o", color=USED, markersize=6, markeredgecolor=PAPER)
        pictures.label(ax, machine.name, place, shifts.get(machine.name, (7, 0)), USED)


def who_is_where(ax: Axes, moments: Sequence[Mapping[int, str]]) -> None:
    """A row a request, a column a step, the first to arrive at the top."""
    boxes: dict[str, list] = {place: [] for place in PLACES}
    num_requests = 1 + max(max(moment, default=0) for moment in moments)
    for number in range(num_requests):
        places = [moment.get(number, "") for moment in moments]
        for place, start, length in stretches(places):
            thin = 0.0 if place == "runs" else 0.2
            boxes[place].append(pictures.box(start, length, number + 0.08 + thin, 0.84 - 2 * thin))
    for place, color in PLACES.items():
        pictures.polygons(ax, boxes[place], color)
    ax.set(xlim=(0, len(moments)), ylim=(num_requests, 0), yticks=[], ylabel="requests, by arrival")
    pictures.thousands(ax.xaxis)


def stretches(places: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return the stretches in which nothing changes: what, from when, how long. Empty ones are left out.

    >>> stretches(["waits", "runs", "runs", "", ""])
    [('waits', 0, 1), ('runs', 1, 2)]
    """
    found, start = [], 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != places[start]:
            if places[start]:
                found.append((places[start], start, end - start))
            start = end
    return found


def draw_lanes(ax: Axes, lanes: Lanes, title: str) -> None:
    """Above the stream of the steps: a box a step, with the names of whose tokens it computes; below that of copies."""
    for at, who in lanes.steps:
        color = ACCENT if "C" in who else USED
        pictures.polygons(ax, [pictures.box(at + 0.03, 0.94, 1.1, 0.8)], color)
        ax.text(at + 0.5, 1.5, " ".join(who), ha="center", va="center", fontsize=7.5, color=PAPER)
    for start, end in lanes.loads:
        pictures.polygons(ax, [pictures.box(start + 0.03, end - start - 0.06, 0.1, 0.8)], GREY)
        ax.text((start + end) / 2, 0.5, "C's blocks arrive", ha="center", va="center", fontsize=7.5, color=PAPER)
    ax.set(ylim=(0, 2), yticks=[0.5, 1.5], yticklabels=["copies", "steps"], title=title)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
