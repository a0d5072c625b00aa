"""Numbers of several types in one buffer, so that all of them reach the device in one copy, which nobody waits for."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

DTypes = Mapping[str, torch.dtype]  # by the field's name, the widest first


def room_for(dtypes: DTypes, size: int, device: torch.device, is_pinned: bool = False) -> Tensor:
    """uint8, for a number of each field for `size` rows. From pinned memory of the host copies need no waiting."""
    num_bytes = size * sum(dtype.itemsize for dtype in dtypes.values())
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device, pin_memory=is_pinned)


def fields_of(buffer: Tensor, dtypes: DTypes) -> dict[str, Tensor]:
    """Return views of a buffer of room_for(), one behind the other: [size] each.

    >>> fields = fields_of(torch.zeros(24, dtype=torch.uint8), {"a": torch.int64, "b": torch.int32})
    >>> fields["a"].shape, fields["b"].shape
    (torch.Size([2]), torch.Size([2]))
    """
    size = len(buffer) // sum(dtype.itemsize for dtype in dtypes.values())
    parts = buffer.split([size * dtype.itemsize for dtype in dtypes.values()])
    return {name: part.view(dtype) for (name, dtype), part in zip(dtypes.items(), parts, strict=True)}


def numbers_of(buffer: Tensor, dtypes: DTypes) -> dict[str, np.ndarray]:
    """Return the views of a buffer of the host as arrays, to write numbers without an operation of torch."""
    return {name: field.numpy() for name, field in fields_of(buffer, dtypes).items()}
