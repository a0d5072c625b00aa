"""Folders whose linear layers are in integers: GPTQ's, and compressed-tensors' format pack-quantized.

A weight of 8 numbers of 4 bits in each word, with a scale and a zero point for each group of numbers of a row:

    GPTQ (qweight, qzeros, scales)                       words along in_features; [in_features / 8, out_features]
    pack-quantized (weight_packed, weight_scale, ...)    words along in_features; [out_features, in_features / 8]

Sources: the loaders of GPTQModel and compressed-tensors.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..quantization import GROUP, Format, Integers
from .entries import Entries

SUPPORTED = "GPTQ in 4 bits without desc_act, and compressed-tensors' pack-quantized W4A16 and W8A16"
PARTS = {  # tensors of a weight; the first is always there
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "compressed-tensors": ("weight_packed", "weight_zero_point", "weight_scale", "weight_shape"),
}


class Scheme(NamedTuple):
    """The form of stored weights, as config.json describes it."""

    method: str  # "gptq" or "compressed-tensors"
    bits: int
    group_size: int  # -1: a scale for a whole row
    first_zero: int = 0  # what a stored zero point of 0 stands for

    @classmethod
    def read(cls, config: Entries) -> "Scheme | None":
        """Return the scheme, or None for floating-point weights. Raise ValueError if it is not supported."""
        for name in ("quantization_config", "compression_config"):
            if name in config:
                entries = config.entries(name)
                scheme = cls.of_values(entries.values)
                if scheme is None or not scheme.is_supported():
                    method = entries.values.get("quant_method")
                    raise ValueError(
                        f"{config.path}: {name} (quant_method {method!r}) is not supported; supported are {SUPPORTED}"
                    )
                return scheme
        return None

    @classmethod
    def of_values(cls, values: dict[str, Any]) -> "Scheme | None":
        """Return the scheme that the entries of quantization_config describe, or None for an unknown one."""
        if values.get("quant_method") == "gptq" and not values.get("desc_act"):
            first_zero = 0 if values.get("checkpoint_format") == "gptq_v2" else 1
            return cls("gptq", values.get("bits", 0), values.get("group_size", 0), first_zero)
        groups = values.get("config_groups")
        if values.get("format") != "pack-quantized" or not isinstance(groups, dict) or len(groups) != 1:
            return None
        (group,) = groups.values()
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or group.get("input_activations") or values.get("kv_cache_scheme"):
            return None
        is_simple = weights.get("type") == "int" and not weights.get("actorder") and not weights.get("dynamic")
        strategy, bits = weights.get("strategy"), weights.get("num_bits", 0)
        size = {"channel": -1, "group": weights.get("group_size", 0)}.get(str(strategy), 0)
        if not is_simple or (bits == 8 and not weights.get("symmetric", True)):
            return None
        return cls("compressed-tensors", bits, size)

    def is_supported(self) -> bool:
        """Return whether a format holds such weights."""
        if not isinstance(self.bits, int) or not isinstance(self.group_size, int):
            return False
        fits = self.group_size == -1 or (self.group_size > 0 and self.group_size % GROUP == 0)
        return fits and (self.bits == 4 or (self.bits == 8 and self.method != "gptq"))


class PackedTensors:
    """The weights of a folder that are in integers."""

    def __init__(self, scheme: Scheme, names: Container[str]) -> None:
        """`names` are the tensors of the folder."""
        self._scheme, self._names = scheme, names
        in_bytes = Format.INT8 if scheme.group_size == -1 else Format.INT8_GROUPS
        self.format = in_bytes if scheme.bits == 8 else Format.INT4_FLOAT32

    @classmethod
    def of(cls, config: Entries, names: Container[str]) -> "PackedTensors | None":
        """Return the packed weights of a folder, or None if its weights are floating-point numbers."""
        scheme = Scheme.read(config)
        return None if scheme is None else cls(scheme, names)

    def __contains__(self, name: str) -> bool:
        """Return whether `name`, a weight, is in integers."""
        return name.removesuffix("weight") + PARTS[self._scheme.method][0] in self._names

    def parts(self, name: str) -> list[str]:
        """Return the names of a weight's tensors in the folder. The one with the integers comes first."""
        names = (name.removesuffix("weight") + part for part in PARTS[self._scheme.method])
        return [each for each in names if each in self._names]

    def shape(self, name: str, stored: Mapping[str, Sequence[int]]) -> list[int]:
        """Return the shape of a weight in integers, given the shapes of the folder's tensors."""
        words = stored[self.parts(name)[0]][:: -1 if self._scheme.method == "gptq" else 1]
        return [*words[:-1], *(size * 32 // self._scheme.bits for size in words[-1:])]

    def integers(self, name: str, get: Callable[[str], Tensor]) -> Integers:
        """Return a weight. `get` reads a tensor of the folder. Raise ValueError if its tensors don't fit together."""
        found = {full.rpartition(".")[2]: get(full) for full in self.parts(name)}
        try:
            integers = self._of_gptq(**found) if self._scheme.method == "gptq" else self._of_words(**found)
            if len(integers.scales) != len(integers.q) or integers.q.shape[1] % integers.scales.shape[1]:
                raise RuntimeError("each row needs its scales")
            return integers
        except (RuntimeError, TypeError) as error:
            shapes = ", ".join(f"{part} {[*tensor.shape]}" for part, tensor in found.items())
            raise ValueError(f"the tensors of {name} don't fit together ({shapes}): {error}") from None

    def _of_gptq(self, qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None) -> Integers:
        q, size, groups = halves_of(qweight.T), len(qweight) * 8, g_idx
        if groups is not None and not torch.equal(groups.long(), torch.arange(size) // (size // len(scales))):
            raise RuntimeError("its groups are in another order")
        zero_points = (halves_of(qzeros) + self._scheme.first_zero).T  # [outputs, groups]
        return with_zero_points(q, scales.T, zero_points)

    def _of_words(
        self,
        weight_packed: Tensor,
        weight_scale: Tensor,
        weight_zero_point: Tensor | None = None,
        weight_shape: Tensor | None = None,  # the packed one says it too, for sizes that formats hold
    ) -> Integers:
        words, scales, zeros = weight_packed, weight_scale, weight_zero_point
        if self._scheme.bits == 8:
            return Integers(words.contiguous().view(torch.uint8), scales.float())
        if zeros is None:
            zero_points = torch.full_like(scales, 8)
        else:
            zero_points = zeros + 8 if zeros.dtype == torch.int8 else halves_of(zeros.T).T[: len(scales)]
        return with_zero_points(halves_of(words), scales, zero_points)


def halves_of(words: Tensor) -> Tensor:
    """Return the 8 numbers of 4 bits in each word, from the lowest on: int32 [n, words] -> uint8 [n, 8 * words]."""
    both = words.contiguous().view(torch.uint8)
    return torch.stack((both & 15, both >> 4), 2).flatten(1)


def with_zero_points(q: Tensor, scales: Tensor, zero_points: Tensor) -> Integers:
    """Return integers of which `zero_points` stand for 0. float32 holds -scale * zero_point exactly."""
    scales = scales.float().contiguous()
    return Integers(q, scales, -scales * zero_points.float())
