"""Counters: operations that torch carries out, tensors that it allocates memory for, and its peak memory."""

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
    """The sizes in bytes of the tensors that torch allocates memory for inside `with Allocations() as made:`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage.data_ptr() for storage in storages((args, kwargs))}
        self.sizes += [storage.nbytes() for storage in storages(out) if storage.data_ptr() not in given]
        return out


def storages(tree: Any) -> list[Any]:
    """Return the memory under each tensor in nested lists, tuples and dicts."""
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Operations(TorchDispatchMode):
    """The `count` of operations that torch carries out inside `with Operations() as done:`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


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
