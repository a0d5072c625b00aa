"""Counters: operations that torch carries out, and its peak memory."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """The `count` of operations that torch carries out inside `with Operations() as done:`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def num_operations(call: Callable[[], object]) -> int:
    """Return the operations that torch carries out in the call."""
    with Operations() as done:
        call()
    return done.count


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most memory that torch holds on the CPU during the call, beyond what it holds before."""
    with silent_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()  # negative if memory is freed
        peak = max(peak, held)
    return peak


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Hide standard error, on which the profiler reports its own start and end, past Python."""
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
