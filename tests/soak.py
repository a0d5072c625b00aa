"""A million random steps of all stages, with the checks of tests/history.py after each.

    python -m tests.soak --steps 1000000 --seed 0               all stages in turn, on two processes
    python -m tests.soak --stage s7 --seed 0 --history 123      one history again
    python -m tests.soak --kernels --requests 20000             the package's engine on kernels (tests/kernel_soak.py)

The same seed gives the same histories and counts on any number of processes. At a fault, it prints the smallest part
of the history that still shows it, and the command that plays it again.
"""

import argparse
import os
import random
import sys
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from itertools import count
from multiprocessing import get_context
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

from tqdm import tqdm

from tests.helpers import ROOT, find_stages
from tests.history import play
from tests.plans import Plan, random_plan, shrink
from tests.scripted_llm import Stage

BRANCHES = ("stages.more_beams",)  # with events that no stage has
HISTORIES_PER_TASK = 10
TASKS_AHEAD = 4  # of the current task: the same for any number of processes
LENGTHS = (20, 60, 200)  # of a history, in events
COUNTS = ["tokens", "preempted", "blocks copied", "tokens hit", "blocks stored", "blocks loaded", "raised"]


class Fault(NamedTuple):
    """A history that went wrong."""

    stage: str
    history: int
    error: str
    plan: Plan

    def __str__(self) -> str:
        events = "".join(f"        {event},\n" for event in self.plan.events)
        return f"{self.error}\n\n    Plan({self.plan.options}, [\n{events}    ])\n"


def history_plan(stage: Stage, seed: int, history: int) -> Plan:
    rng = random.Random(f"{seed} {stage.number} {history}")
    return random_plan(stage, rng, rng.choice(LENGTHS))


def error_of(stage: Stage, plan: Plan) -> str | None:
    """Return the error of a plan in one line, or None."""
    try:
        play(stage, plan)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def play_some(name: str, seed: int, histories: range) -> tuple[Counter[str], Fault | None]:
    """Play some histories in one process. Return their counts up to the first fault, and the fault."""
    stage, counts = Stage(name), Counter[str]()
    for history in histories:
        plan = history_plan(stage, seed, history)
        try:
            counts += play(stage, plan)
        except Exception as error:
            kind = type(error).__name__
            plan = shrink(plan, lambda part: (error_of(stage, part) or "").startswith(f"{kind}:"))  # noqa: B023
            return counts, Fault(name, history, error_of(stage, plan) or str(error), plan)
    return counts, None


def soak(pool: Executor, name: str, seed: int, num_steps: int) -> Iterator[tuple[Counter[str], Fault | None]]:
    """Play histories of a stage until they have num_steps together. Yield the results of play_some() in order."""
    tasks: deque[Future] = deque()
    starts = count(0, HISTORIES_PER_TASK)
    while num_steps > 0:
        while len(tasks) < TASKS_AHEAD:
            start = next(starts)
            tasks.append(pool.submit(play_some, name, seed, range(start, start + HISTORIES_PER_TASK)))
        counts, fault = tasks.popleft().result()
        num_steps -= counts["steps"]
        yield counts, fault
    for task in tasks:
        task.cancel()


def soak_all(names: list[str], args: argparse.Namespace) -> tuple[Counter[str], Fault | None]:
    """Soak one stage after another, up to the first fault."""
    total = Counter[str]()
    pool = ProcessPoolExecutor(args.processes, mp_context=get_context("spawn"))
    with pool, tqdm(total=args.steps, unit=" steps", disable=None, smoothing=0.1) as bar:
        for name in names:
            bar.set_description(name.rpartition(".")[2])
            for counts, fault in soak(pool, name, args.seed, -(-args.steps // len(names))):
                total += counts
                bar.update(counts["steps"])
                if fault:
                    pool.shutdown(cancel_futures=True)
                    return total, fault
    return total, None


def summary(counts: Counter[str]) -> str:
    details = ", ".join(f"{counts[what]:,} {what}" for what in COUNTS)
    return (
        f"{counts['steps']:,} steps of {counts['requests']:,} requests in {counts['histories']:,} histories: {details}"
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000, help="all stages together (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stage", help="only this stage, such as s7, or more_beams (default: all in turn)")
    parser.add_argument("--history", type=int, help="play only this history of a stage")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kernels", action="store_true", help="soak the package's kernels; see --kernels --help")
    return parser


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if "--kernels" in argv:
        from tests import kernel_soak  # it needs Numba

        return kernel_soak.main([word for word in argv if word != "--kernels"])
    args = make_parser().parse_args(argv)
    stages = [Stage(name) for name in (*find_stages(ROOT), *BRANCHES)]
    names = [stage.name for stage in stages if args.stage in (None, stage.key)]
    if not names or (args.history is not None and len(names) > 1):
        known = ", ".join(stage.key for stage in stages)
        print(f"--stage must be one of {known}, got {args.stage}", file=sys.stderr)
        return 2
    if args.history is not None:
        counts, fault = play_some(names[0], args.seed, range(args.history, args.history + 1))
    else:
        counts, fault = soak_all(names, args)
    print(summary(counts))
    if fault:
        key = Stage(fault.stage).key
        print(f"{fault.stage}, seed {args.seed}, history {fault.history}: {fault}")
        print(f"python -m tests.soak --stage {key} --seed {args.seed} --history {fault.history}")
        return 1
    print(f"seed {args.seed}: no fault")
    return 0


if __name__ == "__main__":
    sys.exit(main())
