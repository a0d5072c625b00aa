"""How long things take, in a notebook that shares its machine with others."""

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Key = TypeVar("Key", bound=Hashable)


def milliseconds(calls: Mapping[Key, Callable[[], object]], rounds: int = 5, shuffle: bool = False) -> dict[Key, float]:
    """The median time of each call, in milliseconds. Each round makes every call once, so that a slow spell of the
    machine falls on all of them; a round before the first is not counted. With `shuffle` each round has an order of its
    own: where calls share memory, one that always follows another finds it in the processor's caches.
    """
    times: dict[Key, list[float]] = {key: [] for key in calls}
    order, rng = list(calls), random.Random(0)
    for _ in range(1 + rounds):
        if shuffle:
            rng.shuffle(order)
        for key in order:
            start = time.perf_counter()
            calls[key]()
            times[key].append(time.perf_counter() - start)
    return {key: 1000 * statistics.median(seconds[1:]) for key, seconds in times.items()}


def microseconds(call: Callable[[], object], times: int = 2000, rounds: int = 7) -> float:
    """The time of one of many calls in a row, in microseconds, for what is too short to time alone: the least of some
    rounds, since whatever else runs can only add to it.
    """
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(times):
            call()
        seconds.append((time.perf_counter() - start) / times)
    return 1e6 * min(seconds)


class Stopwatch:
    """Times an object's methods while the object is in use: `seconds` has the total of each, `calls` their number."""

    def __init__(self, watched: object, *names: str) -> None:
        self.seconds, self.calls = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
        for name in names:
            setattr(watched, name, self._timed(name, getattr(watched, name)))

    def _timed(self, name: str, method: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            start = time.perf_counter()
            try:
                return method(*args)
            finally:
                self.seconds[name] += time.perf_counter() - start
                self.calls[name] += 1

        return call


class Allocations(TorchDispatchMode):
    """Counts the tensors that torch makes memory for inside of `with Allocations() as made:`; `sizes` in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage.data_ptr() for storage in storages((args, kwargs))}
        self.sizes += [storage.nbytes() for storage in storages(out) if storage.data_ptr() not in given]
        return out


def storages(tree: Any) -> list[Any]:
    """The memory under each tensor in nested lists, tuples and dicts."""
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Operations(TorchDispatchMode):
    """Counts the operations that torch carries out inside of `with Operations() as done:`, in `count`."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that torch holds at any moment of the call, beyond what it holds before, on the CPU."""
    with silent_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()  # below 0 where memory is given back
        peak = max(peak, held)
    return peak


@contextmanager
def silent_stderr() -> Iterator[None]:
    """The profiler reports its own start and end there, past Python."""
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
