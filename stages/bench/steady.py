"""Steady figures: turns until the rounds agree, on a machine that does nothing else.

rounds, turns = until_steady(calls, lambda rounds: ratios(rounds, pairs))
result = Quiet().measure("s1", call)        again if other processes worked meanwhile

Tables with rounds of half a minute and more (scoreboard, serving, prefix_cache and the pools of offload) have two or
three rounds instead, and prose prints their ranges.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from nanovllm.bench.harness import Key, Rounds, Scores, medians, take_turns

Result = TypeVar("Result")

# ---- rounds that agree

NUM_ROUNDS = 5
STEADY = 0.1  # the widest range, as a share of its figure: with a wider one, prose does not show the figure alone


def until_steady(
    calls: Mapping[Key, Callable[[], Any]],
    score: Callable[[Rounds[Key]], Scores],
    *,
    least: int = 4 * NUM_ROUNDS,
    most: int = 16 * NUM_ROUNDS,
    warm_ups: int = 1,
    title: str | None = None,
) -> tuple[list[dict[Key, Any]], int]:
    """Take turns until no range in score(rounds) is wider than STEADY. Return the rounds and the number of turns.

    Turns in a row form a round, which has the median of each result. While the rounds disagree, the turns are doubled,
    so each round gets longer. There are `least` to `most` turns, multiples of NUM_ROUNDS.
    """
    turns = take_turns(calls, least, warm_ups=warm_ups, title=title)
    while not is_steady(score(rounds := in_rounds(turns))) and 2 * len(turns) <= most:
        turns += take_turns(calls, len(turns), warm_ups=0, title=title)
    return rounds, len(turns)


def in_rounds(turns: Sequence[Mapping[Key, Any]]) -> list[dict[Key, Any]]:
    """Return NUM_ROUNDS rounds of turns in a row: the median of each result, or of each of its numbers.

    >>> in_rounds([{"a": ms} for ms in (1, 2, 3, 4, 9, 6, 7, 8, 9, 9)])
    [{'a': 1.5}, {'a': 3.5}, {'a': 7.5}, {'a': 7.5}, {'a': 9.0}]
    """
    assert len(turns) % NUM_ROUNDS == 0, f"{len(turns)} turns in {NUM_ROUNDS} rounds"
    size = len(turns) // NUM_ROUNDS
    parts = (turns[start : start + size] for start in range(0, len(turns), size))
    return [{key: median([turn[key] for turn in part]) for key in turns[0]} for part in parts]


def median(results: Sequence[Any]) -> Any:
    """Return the median of numbers, or of each number by name."""
    return medians(results) if isinstance(results[0], Mapping) else statistics.median(results)


def is_steady(scores: Scores) -> bool:
    """Return whether no range is wider than STEADY.

    >>> is_steady({"gain": 2.0, "gain_spread": [1.9, 2.0]}), is_steady({"gain": 2.0, "gain_spread": [1.8, 2.1]})
    (True, False)
    """
    spreads = {key: scores[f"{key}_spread"] for key in scores if f"{key}_spread" in scores}
    return all(largest - least <= STEADY * abs(scores[key]) for key, (least, largest) in spreads.items())


# ---- a quiet machine

LIMIT = 0.3  # of a core that other processes may use
PATIENCE, LOOK = 600.0, 1.0  # seconds to wait for them, and to watch them
TRIES = 3


class BusyMachineError(RuntimeError):
    """Other processes work beside the measurement."""


def work_of_others(proc: Path = Path("/proc"), own: int | None = None) -> float | None:
    """Return the CPU seconds of all but the process `own` (this one) and its descendants since the machine started.

    They include the time that a hypervisor gave to other machines, and in a container often that of its neighbors.
    Return None if the system doesn't report them.
    """
    if not (proc / "stat").exists():
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, (proc / "stat").read_text("utf-8").split()[1:9])
    if not user + system:  # a sandbox that reports zeros
        return None
    parents, ticks = dict[int, int](), dict[int, int]()
    for folder in proc.glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            fields = (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
            ticks[int(folder.name)] = sum(map(int, fields[11:15]))  # of its children that have ended, too
    family = [own or os.getpid()]
    for member in family:  # which grows by each member's children
        family += [pid for pid, parent in parents.items() if parent == member]
    ours = sum(ticks.get(member, 0) for member in family)
    return (user + nice + system + irq + softirq + steal - ours) / os.sysconf("SC_CLK_TCK")


class Quiet:
    """A watch that lets a measurement count only if others use at most LIMIT of a core, on average, meanwhile.

    `look` returns the CPU seconds of others so far. A system that doesn't report them is trusted.
    """

    def __init__(
        self,
        look: Callable[[], float | None] = work_of_others,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._look, self._clock, self._sleep = look, clock, sleep

    def measure(self, name: str, call: Callable[[], Result], tries: int = TRIES) -> Result:
        """Wait for a quiet machine, and return the result of the call.

        Make the call again if others used more than LIMIT of a core meanwhile. Raise BusyMachineError if they did in
        each of the tries, or if the machine stays busy for PATIENCE seconds.
        """
        if self._look() is None:
            say(f"{name}: this system doesn't report other processes' work, so make sure that there is none")
            return call()
        for number in range(1, tries + 1):
            self._wait(name)
            result, cores = self._watch(call)
            if cores <= LIMIT:
                return result
            say(f"{name}: other processes used {cores:.2f} cores meanwhile (try {number} of {tries})")
        raise BusyMachineError(f"{name} was not measured: each time, others used more than {LIMIT} of a core meanwhile")

    def _wait(self, name: str) -> None:
        """Wait until others use at most LIMIT of a core."""
        started = self._clock()
        while (cores := self._watch(lambda: self._sleep(LOOK))[1]) > LIMIT:
            used = f"other processes use {cores:.2f} cores, and {LIMIT} is allowed"
            if (waited := self._clock() - started) >= PATIENCE:
                raise BusyMachineError(f"{name} was not measured: after {PATIENCE / 60:.0f} minutes, {used}")
            if waited < 2 * LOOK:  # once
                say(f"{name} waits: {used}")

    def _watch(self, call: Callable[[], Result]) -> tuple[Result, float]:
        """Make the call. Return its result, and the cores that others used meanwhile."""
        before, started = self._look() or 0.0, self._clock()
        result = call()
        return result, ((self._look() or 0.0) - before) / (self._clock() - started)


def say(line: str) -> None:
    """Print a line beside the progress bars."""
    tqdm.write(line, file=sys.stderr)
