"""Rounds in which what is compared takes turns: a slow spell of the machine falls on all of it alike."""

import random
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

from tqdm import tqdm

Result = TypeVar("Result")


def take_turns(
    calls: Mapping[str, Callable[[], Result]], rounds: int, title: str, warm_ups: int = 1
) -> list[dict[str, Result]]:
    """What each call returned, a dict a round. The first rounds warm up and are left out; the order changes."""
    order, rng, found = list(calls), random.Random(0), []
    for _ in tqdm(range(warm_ups + rounds), title, leave=False, disable=not sys.stderr.isatty()):
        rng.shuffle(order)
        found.append({name: calls[name]() for name in order})
    return found[warm_ups:]


def median(rounds: list[dict[str, Result]], name: str, of: Callable[[Result], float]) -> float:
    return statistics.median(of(each[name]) for each in rounds)


def ratio(rounds: list[dict[str, Result]], above: str, below: str, of: Callable[[Result], float]) -> dict[str, float]:
    """The median of the rounds' ratios, the least and the largest.

    >>> ratio([{"a": 2.0, "b": 1.0}, {"a": 9.0, "b": 3.0}, {"a": 4.0, "b": 4.0}], "a", "b", float)
    {'median': 2.0, 'least': 1.0, 'largest': 3.0}
    """
    each = [of(found[above]) / of(found[below]) for found in rounds]
    numbers = {"median": statistics.median(each), "least": min(each), "largest": max(each)}
    return {name: round(number, 3) for name, number in numbers.items()}
