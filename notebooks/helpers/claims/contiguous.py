"""One contiguous piece per sequence: how much of it is used (claim 1), first fit (2), and requests in flight (20)."""

import bisect
import random
import statistics
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from notebooks.helpers import pictures, s1
from notebooks.helpers.claims.findings import Finding, finding
from stages.bench import replay, timeline, workloads
from stages.bench.engines import silent, without_model
from stages.bench.models import STORYTELLER
from stages.s1_contiguous_cache import SamplingParams
from stages.s1_contiguous_cache.input_processor import InputProcessor
from stages.s1_contiguous_cache.llama import ModelConfig
from stages.s1_contiguous_cache.slot_manager import SlotManager
from stages.s2_block_manager.block_manager import BlockManager

POOL, LONGEST = 8192, 1024
CONFIG = ModelConfig.from_folder(STORYTELLER)


# ---- the share in use


def shares_by_distribution(count: int = 200_000, longest: int = 2048, mean: int = 256) -> list[tuple[float, float]]:
    """Return the used share of what is reserved, at the end of a request and at a random moment.

    There is a pair for each of four distributions of lengths with one mean: constant, uniform, exponential and
    log-normal. A quarter of a sequence is its prompt; the rest comes a token per step. So a sequence lives for 3/4 of
    its length in steps, and is 5/8 full on average. At a random moment one meets long sequences more often.
    """
    rng, pairs = np.random.default_rng(0), []
    drawn = [np.ones(count), rng.uniform(0, 2, count), rng.exponential(1, count), rng.lognormal(0, 1.2, count)]
    for lengths in drawn:
        for _ in range(20):  # scale to the mean, with no length above the longest
            lengths = np.clip(lengths * mean / lengths.mean(), 1, longest)
        at_a_moment = (5 / 8 * lengths * lengths).sum() / (lengths * longest).sum()
        pairs.append((float(lengths.mean() / longest), float(at_a_moment)))
    return pairs


def shares_by_policy(num_steps: int) -> dict[str, float]:
    """Return the used share of the memory that is held, with requests always waiting, for each way to reserve."""
    inputs = InputProcessor(CONFIG, None, LONGEST, seed=0)
    policies = {
        "1,024 slots each": ("max_model_len", lambda request: request.max_tokens),
        "prompt + max_tokens": ("request", lambda request: request.max_tokens),
        "an oracle's length": ("request", lambda request: request.num_output_tokens),
    }
    requests, shares = workloads.traffic(num_steps, seed=1), dict[str, float]()
    for name, (reservation, max_tokens) in policies.items():
        arrivals = []
        for i, request in enumerate(requests):
            params = SamplingParams(max_tokens=max_tokens(request))
            arrivals.append(
                (inputs.process(str(i), [1] * request.num_prompt_tokens, params), request.num_output_tokens)
            )
        manager = SlotManager(POOL, reservation, LONGEST, silent("s1"))
        moments = replay.replay(manager, arrivals, num_steps, SlotManager.can_allocate)
        shares[name] = statistics.mean(moment.report.used / POOL for moment in moments[num_steps // 5 :])
    blocks, sequences = BlockManager(POOL // 16, 16, silent("s2")), replay.arrivals("s2", CONFIG, requests, LONGEST)
    moments = replay.replay(blocks, sequences, num_steps, BlockManager.can_promise)[num_steps // 5 :]
    shares["blocks"] = statistics.mean(moment.report.used / moment.report.held for moment in moments)
    return shares


def finding_1(by_distribution: list[tuple[float, float]], by_policy: dict[str, float]) -> Finding:
    ends, moments = ([pair[i] for pair in by_distribution] for i in (0, 1))
    *pieces, blocks = by_policy.values()
    return finding(
        1,
        empty=1 - max(ends),
        at_a_moment=pictures.span(1 - x for x in moments),
        by_policy=", ".join(f"{share:.0%} ({name})" for name, share in by_policy.items()),
        within=sum(0.20 <= share <= 0.38 for share in pieces),
        under_60=sum(share < 0.6 for share in pieces),
        pieces=1 - pieces[1],
        blocks=1 - blocks,
    )


# ---- first fit


class Moment(NamedTuple):
    """The pool after some operations."""

    num_slots: int
    pieces: tuple[tuple[int, int, int], ...]  # (start, size, used) of each
    full: float  # share of the pool that is held
    fragmentation: float  # 1 - largest free piece / all free memory
    peak: float  # of the fragmentation, so far


class FirstFit:
    """Stage 1's first fit on a sorted list of free pieces, which is fast enough for many runs."""

    def __init__(self, num_slots: int) -> None:
        self.free = [(0, num_slots)]  # (start, size)

    def allocate(self, size: int) -> int | None:
        """Return the start of the first free piece that is large enough, or None."""
        for i, (start, room) in enumerate(self.free):
            if room >= size:
                self.free[i : i + 1] = [(start + size, room - size)] if room > size else []
                return start
        return None

    def release(self, start: int, size: int) -> None:
        """Free a piece, and join it with its free neighbors."""
        i = bisect.bisect(self.free, (start,))
        if i < len(self.free) and self.free[i][0] == start + size:
            size += self.free.pop(i)[1]
        if i and sum(self.free[i - 1]) == start:
            i, start, size = i - 1, self.free[i - 1][0], size + self.free.pop(i - 1)[1]
        self.free.insert(i, (start, size))


SIZES = {  # what "random sizes" may mean; `x` is uniform in 0 .. 1
    "uniform": lambda x: 1 + int(255 * x),
    "log-uniform": lambda x: int(2 ** (8 * x)),
}
AT = ("1,000", "5,000")  # operations
FREES = [0.4] * 5000 + [0.65] * 2400  # share of frees: the text's run, and then the pool drains


def first_fit(law: str, seed: int, drains: bool = False, num_slots: int = 80 * 1024) -> dict[str, Moment]:
    """Return 80 GB in slots of 1 MB after 1,000 and 5,000 operations, and drained to the level of the first moment."""
    rng, pool, moments, peak = random.Random(seed), FirstFit(num_slots), dict[str, Moment](), 0.0
    held = list[tuple[int, int]]()  # (start, size)
    for operation, frees in enumerate(FREES[: None if drains else 5000], start=1):
        if held and rng.random() < frees:
            at = rng.randrange(len(held))
            held[at], held[-1] = held[-1], held[at]
            pool.release(*held.pop())
        else:
            size = max(SIZES[law](rng.random()), 1)
            if (start := pool.allocate(size)) is not None:
                held.append((start, size))
        sizes = [size for _, size in pool.free]
        full, fragmentation = 1 - sum(sizes) / num_slots, 1 - max(sizes, default=0) / max(sum(sizes), 1)
        peak = max(peak, fragmentation)
        name = f"{operation:,}" if operation <= 5000 else "drained"
        if name in AT or (name == "drained" and full <= moments[AT[0]].full):
            pieces = tuple((start, size, size) for start, size in sorted(held))
            moments[name] = Moment(num_slots, pieces, full, fragmentation, peak)
            if name == "drained":
                break
    return moments


def draw_first_fit(moments: dict[str, Moment]) -> Figure:
    """Draw the pool at three moments. The first and the last are equally full, and the measure differs."""
    first, last = moments[AT[0]], moments["drained"]
    title = (
        f"{first.full:.0%} full: the measure is {first.fragmentation:.0%}. "
        f"{last.full:.0%} full again: {last.fragmentation:.0%}"
    )
    fig, axes = pictures.figure(title, height=2.9, rows=3)
    for ax, (name, at) in zip(axes, moments.items(), strict=True):
        when = "drained again" if name == "drained" else f"after {name} operations"
        s1.strip(ax, at)
        ax.set(title=f"{when}: {at.full:.0%} held, measure {at.fragmentation:.0%}", xticks=[])
        pictures.bare(ax)
    return fig


def finding_2(runs: dict[str, list[dict[str, Moment]]]) -> Finding:
    """`runs` has the runs of each law, one per seed."""
    median = {law: [statistics.median(run[at].peak for run in some) for at in AT] for law, some in runs.items()}
    every = [run for some in runs.values() for run in some]
    near = [run for run in every if abs(run[AT[0]].peak - 0.34) < 0.05 and abs(run[AT[1]].peak - 0.41) < 0.05]
    return finding(
        2,
        peaks="; ".join(f"{law} sizes {a:.1%} and {b:.1%}" for law, (a, b) in median.items()),
        full=" and ".join(pictures.span(run[at].full for run in every) for at in AT),
        near=len(near),
        runs=len(every),
    )


# ---- requests in flight


def in_flight(num_steps: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the used share of the pool and the running sequences: in pieces of 1,024, and in stage 4."""
    requests = workloads.traffic(num_steps, seed=1)
    manager = SlotManager(POOL, "max_model_len", LONGEST, silent("s1"))
    arrivals = replay.arrivals("s1", CONFIG, requests, LONGEST)
    moments = replay.replay(manager, arrivals, num_steps, SlotManager.can_allocate)[num_steps // 5 :]
    pieces = (
        statistics.mean(m.report.used / POOL for m in moments),
        statistics.mean(len(m.report.pieces) for m in moments),
    )
    engine = without_model("s4", model=str(STORYTELLER), dtype="float32", kv_cache_tokens=POOL, max_num_seqs=512)
    asked = [timeline.Arrival(0.0, [3] * r.num_prompt_tokens, r.num_output_tokens) for r in requests[: num_steps // 4]]
    run = timeline.continuous(engine, asked)
    last = max(step.start for step in run.steps if any(work.start == 0 for work in step.work.values()))
    steady = [step for step in run.steps if last / 4 <= step.start <= last]  # others wait
    used = [sum(work.start + work.num_tokens for work in step.work.values()) / POOL for step in steady]
    return pieces, (statistics.mean(used), statistics.mean(len(step.work) for step in steady))


def finding_20(pieces: tuple[float, float], blocks: tuple[float, float]) -> Finding:
    times = blocks[1] / pieces[1]
    return finding(20, pieces=pieces, blocks=blocks, times=times, holds="holds" if times > 2.5 else "does not hold")
