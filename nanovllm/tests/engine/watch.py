"""What a piece of code costs, counted: operations, and the memory of the tensors that it makes. Never time."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watch(TorchDispatchMode):
    """`with Watch() as seen:` counts what torch does inside.

    A view of a tensor is an operation and no memory. What a kernel keeps for itself while it runs is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_operations = 0
        self.largest = 0  # bytes of the largest new tensor
        self.peak = 0  # most bytes of new tensors that were there at one time
        self._alive: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_operations += 1
        given = {storage._cdata for storage in storages((args, kwargs))}
        for storage in storages(result):
            if storage._cdata not in given:
                self._alive[StorageWeakRef(storage)] = storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self._alive = {weak: size for weak, size in self._alive.items() if not weak.expired()}
        self.peak = max(self.peak, sum(self._alive.values()))
        return result


def storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
