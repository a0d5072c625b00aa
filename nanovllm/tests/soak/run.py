"""Random steps of the engine, with faults, and all invariants checked after each (history.py).

    python -m nanovllm.tests.soak --steps 1000000 --seed 0     on two processes
    python -m nanovllm.tests.soak --seed 0 --history 123       one history again

The same seed gives the same histories and counts on any number of processes. At a fault, it prints the smallest part of
the history that still shows it, and the command that plays it again.
"""

import argparse
import os
import random
import warnings
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from itertools import count
from multiprocessing import get_context
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from tqdm import tqdm

from .history import play
from .plans import Plan, random_plan, smallest

HISTORIES_PER_TASK = 10
TASKS_AHEAD = 4  # histories in flight; the same on any number of processes
LENGTHS = (20, 60, 200)  # of a history, in events
SHOWN = ("tokens", "preempted", "blocks copied", "tokens hit", "blocks stored", "blocks loaded", "raised")


class Fault(NamedTuple):
    """A history that found a fault."""

    history: int
    error: str
    plan: Plan

    def __str__(self) -> str:
        events = "".join(f"        {event},\n" for event in self.plan.events)
        return f"{self.error}\n\n    Plan({self.plan.setup}, [\n{events}    ])\n"


def history_plan(seed: int, history: int) -> Plan:
    rng = random.Random(f"{seed} {history}")
    return random_plan(rng, rng.choice(LENGTHS))


def error_of(plan: Plan) -> str | None:
    """Return the error of a plan on one line."""
    try:
        play(plan)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def play_some(seed: int, histories: range) -> tuple[Counter[str], Fault | None]:
    """Return the counts up to the first fault. This is a task of one process."""
    warnings.simplefilter("ignore")  # a beam search that is not served
    counts = Counter[str]()
    for history in histories:
        plan = history_plan(seed, history)
        try:
            counts += play(plan)
        except Exception as error:
            kind = f"{type(error).__name__}:"
            plan = smallest(plan, lambda part: (error_of(part) or "").startswith(kind))  # noqa: B023
            return counts, Fault(history, error_of(plan) or str(error), plan)
    return counts, None


def soak(pool: Executor, seed: int, num_steps: int) -> Iterator[tuple[Counter[str], Fault | None]]:
    """Play histories until they have num_steps in total. Yield the results of play_some() in order."""
    tasks: deque[Future] = deque()
    starts = count(0, HISTORIES_PER_TASK)
    while num_steps > 0:
        while len(tasks) < TASKS_AHEAD:
            start = next(starts)
            tasks.append(pool.submit(play_some, seed, range(start, start + HISTORIES_PER_TASK)))
        counts, fault = tasks.popleft().result()
        num_steps -= counts["steps"]
        yield counts, fault
    for task in tasks:
        task.cancel()


def soak_all(args: argparse.Namespace) -> tuple[Counter[str], Fault | None]:
    """Return the counts up to the first fault."""
    total = Counter[str]()
    pool = ProcessPoolExecutor(args.processes, mp_context=get_context("spawn"))
    with pool, tqdm(total=args.steps, unit=" steps", disable=None, smoothing=0.1) as bar:
        for counts, fault in soak(pool, args.seed, args.steps):
            total += counts
            bar.update(counts["steps"])
            if fault:
                pool.shutdown(cancel_futures=True)
                return total, fault
    return total, None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m nanovllm.tests.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--history", type=int, help="play this one only")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args(argv)
    if args.history is not None:
        counts, fault = play_some(args.seed, range(args.history, args.history + 1))
    else:
        counts, fault = soak_all(args)
    shown = ", ".join(f"{counts[name]:,} {name}" for name in SHOWN)
    print(f"{counts['steps']:,} steps of {counts['requests']:,} requests in {counts['histories']:,} histories: {shown}")
    if fault:
        print(f"seed {args.seed}, history {fault.history}: {fault}")
        print(f"python -m nanovllm.tests.soak --seed {args.seed} --history {fault.history}")
        return 1
    print(f"seed {args.seed}: no fault")
    return 0
