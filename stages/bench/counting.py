"""What is counted, not timed: operations that torch carries out, tensors that it makes memory for, its most memory."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
