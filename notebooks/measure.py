"""How long things take, in a notebook that shares its machine with others."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


def milliseconds(calls: Mapping[Key, Callable[[], object]], rounds: int = 5) -> dict[Key, float]:
    """The median time of each call, in milliseconds. Each round makes every call once, so that a slow spell of the
    machine falls on all of them; a round before the first is not counted.
    """
    times: dict[Key, list[float]] = {key: [] for key in calls}
    for _ in range(1 + rounds):
        for key, call in calls.items():
            start = time.perf_counter()
            call()
            times[key].append(time.perf_counter() - start)
    return {key: 1000 * statistics.median(seconds[1:]) for key, seconds in times.items()}
