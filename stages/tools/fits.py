"""python -m stages.tools.fits exercises.s1: does another fit admit more requests? Counts what two SlotManagers admit.

The work is traffic like that of the picture in stage 1's lesson, in a pool of the same size, with eight seeds, of which
the first one is the picture's. Requests arrive, wait for one piece of prompt + max_tokens slots, first come, first
served, grow by a token per step, and leave. No model runs, so the counts are the same on every machine.
"""

import argparse
import sys
from importlib import import_module
from itertools import pairwise
from statistics import fmean
from typing import Any

from stages.bench.engines import PACKAGES, silent
from stages.bench.models import STORYTELLER
from stages.bench.predict.s1 import LONGEST, POOL, START, is_refused
from stages.bench.replay import Moment, arrivals, replay
from stages.bench.workloads import traffic
from stages.s1_contiguous_cache.llama import ModelConfig

STAGE = f"stages.{PACKAGES['s1']}"
NUM_STEPS, SEEDS = 1500, range(1, 9)


def counts(package: str) -> dict[str, str]:
    """Return what the SlotManager of `package` did with the traffic, by title."""
    runs = [run(package, seed) for seed in SEEDS]
    moments = [moment for _, steps in runs for moment in steps[START:]]  # by then the pool has filled up
    return {
        "requests admitted": f"{sum(num_admitted for num_admitted, _ in runs):,}",
        "requests admitted in the first run": f"{runs[0][0]:,}",
        "requests that run at once": f"{fmean(moment.num_running for moment in moments):.2f}",
        "slots held": f"{fmean(moment.report.held / POOL for moment in moments):.1%}",
        "free pieces": f"{fmean(num_free_pieces(moment.report) for moment in moments):.2f}",
        "slots in the largest free piece": f"{fmean(moment.report.largest_free for moment in moments):,.0f}",
        "steps at which enough slots are free, but not in a row": f"{fmean(map(is_refused, moments)):.1%}",
    }


def run(package: str, seed: int) -> tuple[int, list[Moment]]:
    """Return how many requests were admitted, and the pool at each step."""
    manager = import_module(f"{package}.slot_manager").SlotManager(POOL, "request", LONGEST, silent("s1"))
    admitted: list[Any] = []

    def admits(manager: Any, seq: Any) -> bool:
        if fits := manager.can_allocate(seq):
            admitted.append(seq)
        return bool(fits)

    config = ModelConfig.from_folder(STORYTELLER)
    moments = replay(manager, arrivals("s1", config, traffic(NUM_STEPS, seed), LONGEST), NUM_STEPS, admits)
    return len(admitted), moments


def num_free_pieces(report: Any) -> int:
    """Return the number of gaps between the pieces of a pool, and at its ends."""
    edges = [(0, 0), *((start, start + size) for start, size, _ in report.pieces), (report.num_slots, report.num_slots)]
    return sum(left_end < start for (_, left_end), (start, _) in pairwise(edges))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.tools.fits", description=__doc__.partition("\n")[0])
    parser.add_argument("package", nargs="?", default=STAGE, help="a copy of stage 1, such as exercises.s1")
    package = parser.parse_args(arguments).package
    try:
        import_module(f"{package}.slot_manager")
    except ModuleNotFoundError as error:
        print(f"there is no {package}: make exercise STAGE=1 writes exercises.s1 ({error})", file=sys.stderr)
        return 2
    print(f"{NUM_STEPS:,} steps, {len(SEEDS)} times; averages from step {START} on, when the pool is full\n")
    print("\n".join(table(counts(STAGE), counts(package), package)))
    return 0


def table(ours: dict[str, str], theirs: dict[str, str], title: str) -> list[str]:
    r"""Return the lines of a table with one count per line.

    >>> print("\n".join(table({"admitted": "12"}, {"admitted": "13"}, "exercises.s1")))
                first fit  exercises.s1
      admitted         12            13
    """
    rows = [("", "first fit", title), *((name, ours[name], theirs[name]) for name in ours)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [f"  {a:{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows]


if __name__ == "__main__":
    raise SystemExit(main())
