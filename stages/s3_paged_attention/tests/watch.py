"""Watch: counts operations, and the memory of the tensors that they make. Never time."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watch(TorchDispatchMode):
    """A mode that counts operations of torch: `with Watch() as watch:`.

    A view is an operation without memory. Memory that a kernel uses while it runs is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_operations = 0
        self.largest = 0  # bytes of the largest new tensor
        self.peak = 0  # bytes of all new tensors, at the worst moment
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
