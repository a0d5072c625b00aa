"""One contiguous piece per sequence: how much is used (claim 1), first fit (2, 23), and requests in flight (20)."""

from statistics import mean, median
from typing import Any

from matplotlib.figure import Figure

from notebooks.helpers import pictures, s1, size
from notebooks.helpers.claims.findings import Finding, Rows, committed, finding, of_gpu
from stages.bench import replay, timeline, workloads
from stages.bench.engines import silent, without_model
from stages.bench.models import STORYTELLER
from stages.bench.texts import cpp_engine, first_fit
from stages.s1_contiguous_cache.llama import ModelConfig
from stages.s1_contiguous_cache.slot_manager import SlotManager
from stages.s2_block_manager.block_manager import BlockManager

POOL, LONGEST = 8192, 1024
CONFIG = ModelConfig.from_folder(STORYTELLER)


# ---- the share in use


def reports_of(name: str, manager: Any, admits: Any, requests: list[workloads.Traffic]) -> list[Any]:
    """Return the reports of a stage's pool with a request for each step, so that some always wait."""
    moments = replay.replay(manager, replay.arrivals(name, CONFIG, requests, LONGEST), len(requests), admits)
    return [moment.report for moment in moments[len(requests) // 5 :]]


def in_pieces(reservation: str, requests: list[workloads.Traffic]) -> list[Any]:
    """Return the reports of stage 1's pool."""
    manager = SlotManager(POOL, reservation, LONGEST, silent("s1"))
    return reports_of("s1", manager, SlotManager.can_allocate, requests)


def in_blocks(requests: list[workloads.Traffic]) -> list[Any]:
    """Return the reports of stage 2's pool."""
    return reports_of("s2", BlockManager(POOL // 16, 16, silent("s2")), BlockManager.can_promise, requests)


def finding_1() -> Finding:
    requests = workloads.traffic(size(1500, 400), seed=1)
    oracle = [request._replace(max_tokens=request.num_output_tokens) for request in requests]
    reports = {
        "1,024 slots each": in_pieces("max_model_len", requests),
        "prompt + max_tokens": in_pieces("request", requests),
        "an oracle's length": in_pieces("request", oracle),
    }
    shares = {name: mean(report.used / POOL for report in some) for name, some in reports.items()}
    pieces, blocks = [*shares.values()], mean(report.used / report.held for report in in_blocks(requests))
    reserved, paged = cpp_engine.comparison()
    return finding(
        1,
        example=f"{reserved:,.0f} MiB reserved, {paged:,.0f} MiB in blocks: {1 - paged / reserved:.1%} is empty",
        by_policy=", ".join(f"{share:.0%} ({name})" for name, share in (shares | {"blocks": blocks}).items()),
        within=sum(0.20 <= share <= 0.38 for share in pieces),
        under_60=sum(share < 0.6 for share in pieces),
        pieces=1 - pieces[1],
        blocks=1 - blocks,
    )


# ---- first fit

AT = (100, 500, 1000, 5000)  # operations of the text's simulation


def draw_first_fit() -> Figure:
    """Draw the pool at three moments. The first and the last are equally full, and the measure differs."""
    moments = first, _, last = [*first_fit.drained()]
    title = (
        f"{first.full:.0%} full: the measure is {first.fragmentation:.0%}. "
        f"{last.full:.0%} full again: {last.fragmentation:.0%}"
    )
    fig, axes = pictures.figure(title, height=2.9, rows=3)
    names = ("after 1,000 operations", "after 5,000 operations", "drained again")
    for ax, name, at in zip(axes, names, moments, strict=True):
        s1.strip(ax, at)
        ax.set(title=f"{name}: {at.full:.0%} held, measure {at.fragmentation:.0%}", xticks=[])
        pictures.bare(ax)
    return fig


def finding_2() -> Finding:
    """Run the text's simulation, the longest with half as many seeds."""
    seeds = size(20, 2)
    long = [first_fit.simulate(seed, AT[-1])[0] for seed in range(seeds // 2)]
    runs = long + [first_fit.simulate(seed, AT[-2])[0] for seed in range(seeds // 2, seeds)]
    peaks = [[run[n - 1].peak for run in runs if len(run) >= n] for n in AT]
    shown = [f"{median(some):.1%} ({min(some):.1%} to {max(some):.1%})" for some in peaks]
    passed = [next(i for i, at in enumerate(run) if at.peak >= 0.34) for run in long]
    refused = [next(i for i, at in enumerate(run) if at.is_refused) for run in long]
    return finding(
        2,
        holds_as_worded=min(passed) > 1000,
        peaks=", ".join(shown),
        at_1000=shown[2],
        passed=f"{min(passed) + 1:,} to {max(passed) + 1:,}",
        passed_full=median(run[i].full for run, i in zip(long, passed, strict=True)),
        refused=median(refused) + 1,
        refused_full=median(run[i].full for run, i in zip(long, refused, strict=True)),
        full=median(run[999].full for run in runs),
        gloss=1 - 2 / 27.9,
        of_device=27_900 / first_fit.DEVICE,
    )


def finding_23() -> Finding:
    def call(machine: str, rows: Rows) -> str:
        us = 1e6 / rows["device's own"]["operations/s"]
        return f"{us:.0f} us a call on {machine}"

    return finding(
        23,
        regions=[len(first_fit.simulate(0, num_operations)[1].free) for num_operations in AT[2:]],
        gpu=of_gpu(5, "Claim 5", call),
        slab_holds="near 100 ns" if committed("claims.own.slab").value < 0.3 else "slower than 100 ns here",
    )


# ---- requests in flight


def in_flight(requests: list[workloads.Traffic]) -> tuple[float, float]:
    """Return the used share of stage 4's pool, and the running sequences."""
    engine = without_model("s4", model=str(STORYTELLER), dtype="float32", kv_cache_tokens=POOL, max_num_seqs=512)
    asked = [timeline.Arrival(0.0, [3] * request.num_prompt_tokens, request.num_output_tokens) for request in requests]
    steps = timeline.continuous(engine, asked).steps
    last = max(step.start for step in steps if any(work.start == 0 for work in step.work.values()))
    steady = [step.work.values() for step in steps if last / 4 <= step.start <= last]  # others wait
    used = [sum(work.start + work.num_tokens for work in step) / POOL for step in steady]
    return mean(used), mean(map(len, steady))


def finding_20() -> Finding:
    requests = workloads.traffic(size(1200, 400), seed=1)
    reports, blocks = in_pieces("max_model_len", requests), in_flight(requests[: len(requests) // 4])
    pieces = mean(report.used / POOL for report in reports), mean(len(report.pieces) for report in reports)
    times = blocks[1] / pieces[1]
    return finding(20, pieces=pieces, blocks=blocks, times=times, holds="holds" if times > 2.5 else "does not hold")
