"""The cost of a piece of code, in operations and in the memory of the tensors that it creates, but never in time."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watch(TorchDispatchMode):
    """A context manager that counts torch's operations and allocations in its block.

    A view of a tensor is an operation without memory. The temporary memory of a kernel is not visible.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_operations = 0
        self.largest = 0  # bytes of the largest new tensor
        self.peak = 0  # peak bytes of new tensors
        self._alive: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_operations += 1
        given = {StorageWeakRef(storage) for storage in storages((args, kwargs))}
        for storage in storages(result):
            if StorageWeakRef(storage) not in given:
                self._alive[StorageWeakRef(storage)] = storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self._alive = {weak: size for weak, size in self._alive.items() if not weak.expired()}
        self.peak = max(self.peak, sum(self._alive.values()))
        return result


def storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def num_calls(function: Callable[[], Any]) -> int:
    """Return how many calls of Python functions and builtins a call of `function` takes."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def num_lines(function: Callable[[], Any]) -> int:
    """Return how many lines of Python a call of `function` runs."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count
