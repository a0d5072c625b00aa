"""The memory behind PyTorch's tensors, and the sizes of its allocations."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """The sizes in bytes of the tensors that are allocated inside `with Allocations() as made:`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage.data_ptr() for storage in storages((args, kwargs))}
        self.sizes += [storage.nbytes() for storage in storages(out) if storage.data_ptr() not in given]
        return out


def storages(tree: Any) -> list[Any]:
    """Return the memory behind each tensor in nested lists, tuples and dicts."""
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
