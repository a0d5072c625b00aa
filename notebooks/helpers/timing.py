"""The time of short calls, on the harness of nanovllm/bench."""

from collections.abc import Callable, Mapping

from nanovllm.bench.harness import Key, medians, repeated, seconds_of, take_turns, timed


def milliseconds(calls: Mapping[Key, Callable[[], object]], rounds: int = 5) -> dict[Key, float]:
    """Return the median time of each call in milliseconds. Calls take turns."""
    times = take_turns({key: timed(call) for key, call in calls.items()}, rounds)
    return {key: 1000 * seconds for key, seconds in medians(times).items()}


def microseconds(call: Callable[[], object], times: int = 2000, rounds: int = 7) -> float:
    """Return the time of a call in microseconds, measured over many calls in a row because one is too short to time.

    This is the minimum over several rounds, because other work on the machine can only add to it.
    """
    many = repeated(call, times)
    return 1e6 * min(seconds_of(many) for _ in range(rounds)) / times
