"""One contiguous piece per sequence: how much is used (claim 1), first fit (2, 23), and requests in flight (20)."""

import statistics

from matplotlib.figure import Figure

from notebooks.helpers import pictures, s1
from notebooks.helpers.claims.findings import Finding, committed, finding, not_measured, on_gpu
from stages.bench import replay, timeline, workloads
from stages.bench.engines import silent, without_model
from stages.bench.models import STORYTELLER
from stages.bench.texts import cpp_engine, first_fit
from stages.bench.texts.first_fit import Moment
from stages.s1_contiguous_cache import SamplingParams
from stages.s1_contiguous_cache.input_processor import InputProcessor
from stages.s1_contiguous_cache.llama import ModelConfig
from stages.s1_contiguous_cache.slot_manager import SlotManager
from stages.s2_block_manager.block_manager import BlockManager

POOL, LONGEST = 8192, 1024
CONFIG = ModelConfig.from_folder(STORYTELLER)


# ---- the share in use


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


def finding_1(by_policy: dict[str, float]) -> Finding:
    *pieces, blocks = by_policy.values()
    reserved, paged = cpp_engine.comparison()
    return finding(
        1,
        example=f"{reserved:,.0f} MiB reserved, {paged:,.0f} MiB in blocks: {1 - paged / reserved:.1%} is empty",
        by_policy=", ".join(f"{share:.0%} ({name})" for name, share in by_policy.items()),
        within=sum(0.20 <= share <= 0.38 for share in pieces),
        under_60=sum(share < 0.6 for share in pieces),
        pieces=1 - pieces[1],
        blocks=1 - blocks,
    )


# ---- first fit

AT = (100, 500, 1000, 5000)  # operations of the text's simulation


def draw_first_fit(moments: list[Moment]) -> Figure:
    """Draw the pool at three moments. The first and the last are equally full, and the measure differs."""
    first, _, last = moments
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


def finding_2(seeds: int) -> Finding:
    """Run the text's simulation, the longest with half as many seeds."""
    runs = [first_fit.simulate(seed, AT[-1] if seed < max(1, seeds // 2) else AT[-2])[0] for seed in range(seeds)]
    long = [run for run in runs if len(run) == AT[-1]]
    peaks = {n: [run[n - 1].peak for run in runs if len(run) >= n] for n in AT}
    shown = [f"{statistics.median(peaks[n]):.1%} ({min(peaks[n]):.1%} to {max(peaks[n]):.1%})" for n in AT]
    passed = [next(i for i, at in enumerate(run) if at.peak >= 0.34) for run in long]
    refused = [next(i for i, at in enumerate(run) if at.is_refused) for run in long]
    return finding(
        2,
        holds_as_worded=min(passed) > 1000,
        peaks=", ".join(shown),
        at_1000=shown[2],
        passed=f"{min(passed) + 1:,} to {max(passed) + 1:,}",
        passed_full=statistics.median(run[i].full for run, i in zip(long, passed, strict=True)),
        refused=statistics.median(refused) + 1,
        refused_full=statistics.median(run[i].full for run, i in zip(long, refused, strict=True)),
        full=statistics.median(run[999].full for run in runs),
        gloss=1 - 2 / 27.9,
        of_device=27_900 / first_fit.DEVICE,
    )


def finding_23() -> Finding:
    slab, few, many = (committed(f"claims.own.{key}") for key in ("slab", "first_fit_73", "first_fit_296"))
    table = on_gpu(5, "Claim 5")
    device = table and table.rows.get("device's own")
    return finding(
        23,
        regions=[len(first_fit.simulate(0, num_operations)[1].free) for num_operations in (1000, 5000)],
        slab=slab.text("{:.0f}", 1000),
        few=few.text("{:.1f}"),
        many=many.text("{:.1f}"),
        gpu=f"{1e6 / device['operations/s']:.0f} us a call on {table.machine}" if table and device else not_measured(5),
        slab_holds="near 100 ns" if slab.value < 0.3 else "slower than 100 ns here",
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
