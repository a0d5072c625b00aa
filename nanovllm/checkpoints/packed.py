"""Checkpoints whose linear layers are integers: GPTQ's, and compressed-tensors' pack-quantized format.

A 4-bit weight has 8 numbers in each int32 word, and a scale and a zero point for each group of numbers in a row. In
both formats, a word holds numbers of one output that are neighbors along in_features:

    GPTQ (qweight, qzeros, scales)                       int32 [in_features / 8, out_features]
    pack-quantized (weight_packed, weight_scale, ...)    int32 [out_features, in_features / 8]

Sources: the loaders of GPTQModel and compressed-tensors.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..quantization import GROUP, Format, Integers
from .entries import Entries

SUPPORTED = "GPTQ in 4 bits without desc_act, and compressed-tensors' pack-quantized W4A16 and W8A16"
TENSOR_NAMES = {  # tensors that make up a weight; the first is always present
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "compressed-tensors": ("weight_packed", "weight_zero_point", "weight_scale", "weight_shape"),
}


class Scheme(NamedTuple):
    """The quantization scheme of the stored weights, from config.json."""

    method: str  # "gptq" or "compressed-tensors"
    bits: int
    group_size: int  # -1: one scale for a whole row
    zero_offset: int = 0  # to add to each stored zero point

    @classmethod
    def read(cls, config: Entries) -> "Scheme | None":
        """Return config.json's scheme, or None if weights are floating point. Raise ValueError if it is unsupported."""
        for name in ("quantization_config", "compression_config"):
            if name in config:
                entries = config.entries(name)
                scheme = cls.from_values(entries.values)
                if scheme is None or not scheme.is_supported():
                    method = entries.values.get("quant_method")
                    raise ValueError(
                        f"{config.path}: {name} (quant_method {method!r}) is not supported; supported are {SUPPORTED}"
                    )
                return scheme
        return None

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> "Scheme | None":
        """Return the scheme that the entries of quantization_config describe, or None for an unknown one."""
        if values.get("quant_method") == "gptq" and not values.get("desc_act"):
            zero_offset = 0 if values.get("checkpoint_format") == "gptq_v2" else 1
            return cls("gptq", values.get("bits", 0), values.get("group_size", 0), zero_offset)
        groups = values.get("config_groups")
        if values.get("format") != "pack-quantized" or not isinstance(groups, dict) or len(groups) != 1:
            return None
        (group,) = groups.values()
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or group.get("input_activations") or values.get("kv_cache_scheme"):
            return None
        is_simple = weights.get("type") == "int" and not weights.get("actorder") and not weights.get("dynamic")
        strategy, bits = weights.get("strategy"), weights.get("num_bits", 0)
        group_size = {"channel": -1, "group": weights.get("group_size", 0)}.get(str(strategy), 0)
        if not is_simple or (bits == 8 and not weights.get("symmetric", True)):
            return None
        return cls("compressed-tensors", bits, group_size)

    def is_supported(self) -> bool:
        """Return whether a Format can represent these weights."""
        if not isinstance(self.bits, int) or not isinstance(self.group_size, int):
            return False
        is_divisible = self.group_size == -1 or (self.group_size > 0 and self.group_size % GROUP == 0)
        return is_divisible and (self.bits == 4 or (self.bits == 8 and self.method != "gptq"))


class PackedTensors:
    """The integer weights of a folder."""

    def __init__(self, scheme: Scheme, stored_names: Container[str]) -> None:
        """Choose the Format. `stored_names` are the names of all tensors in the folder."""
        self._scheme, self._stored_names = scheme, stored_names
        format_8bit = Format.INT8 if scheme.group_size == -1 else Format.INT8_GROUPS
        self.format = format_8bit if scheme.bits == 8 else Format.INT4_FLOAT32

    @classmethod
    def from_config(cls, config: Entries, stored_names: Container[str]) -> "PackedTensors | None":
        """Return a folder's integer weights, or None if config.json describes floating-point weights."""
        scheme = Scheme.read(config)
        return None if scheme is None else cls(scheme, stored_names)

    def __contains__(self, name: str) -> bool:
        """Return whether the weight `name` is stored in integers."""
        return name.removesuffix("weight") + TENSOR_NAMES[self._scheme.method][0] in self._stored_names

    def tensor_names(self, name: str) -> list[str]:
        """Return the names of the stored tensors that make up a weight. The one with the integers comes first."""
        names = [name.removesuffix("weight") + suffix for suffix in TENSOR_NAMES[self._scheme.method]]
        return [tensor_name for tensor_name in names if tensor_name in self._stored_names]

    def shape(self, name: str, stored_shapes: Mapping[str, Sequence[int]]) -> list[int]:
        """Return the shape of an integer weight, given the shapes of the folder's tensors."""
        shape = stored_shapes[self.tensor_names(name)[0]][:: -1 if self._scheme.method == "gptq" else 1]  # in words
        return [*shape[:-1], *(num_words * 32 // self._scheme.bits for num_words in shape[-1:])]

    def integers(self, name: str, read_tensor: Callable[[str], Tensor]) -> Integers:
        """Return a weight, given a function that reads a tensor of the folder by name.

        Raise ValueError if the tensors that make up the weight don't fit together.
        """
        tensors = {stored.rpartition(".")[2]: read_tensor(stored) for stored in self.tensor_names(name)}
        try:
            integers = self._read_gptq(**tensors) if self._scheme.method == "gptq" else self._read_compressed(**tensors)
            if len(integers.scales) != len(integers.q) or integers.q.shape[1] % integers.scales.shape[1]:
                raise RuntimeError("each row needs the same number of scales, which must divide its length")
            return integers
        except (RuntimeError, TypeError) as error:
            shapes = ", ".join(f"{suffix} {[*tensor.shape]}" for suffix, tensor in tensors.items())
            raise ValueError(f"the tensors of {name} don't fit together ({shapes}): {error}") from None

    def _read_gptq(self, qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None) -> Integers:
        q, size = unpack_int4(qweight.T), len(qweight) * 8
        if g_idx is not None and not torch.equal(g_idx.long(), torch.arange(size) // (size // len(scales))):
            raise RuntimeError("in g_idx, the groups are in another order")
        zero_points = (unpack_int4(qzeros) + self._scheme.zero_offset).T  # [outputs, groups]
        return with_zero_points(q, scales.T, zero_points)

    def _read_compressed(
        self,
        weight_packed: Tensor,
        weight_scale: Tensor,
        weight_zero_point: Tensor | None = None,
        weight_shape: Tensor | None = None,  # unused: the shape of weight_packed implies it
    ) -> Integers:
        words, scales, zeros = weight_packed, weight_scale, weight_zero_point
        if self._scheme.bits == 8:
            return Integers(words.contiguous().view(torch.uint8), scales.float())
        if zeros is None:
            zero_points = torch.full_like(scales, 8)
        else:
            zero_points = zeros + 8 if zeros.dtype == torch.int8 else unpack_int4(zeros.T).T[: len(scales)]
        return with_zero_points(unpack_int4(words), scales, zero_points)


def unpack_int4(words: Tensor) -> Tensor:
    """Return the 8 numbers in each word, from the lowest 4 bits up: int32 [n, words] -> uint8 [n, 8 * words]."""
    pairs = words.contiguous().view(torch.uint8)  # two numbers in each byte
    return torch.stack((pairs & 15, pairs >> 4), 2).flatten(1)


def with_zero_points(q: Tensor, scales: Tensor, zero_points: Tensor) -> Integers:
    """Return Integers with minima of -scale * zero_point, so that q = zero_point stands for 0. float32 is exact."""
    scales = scales.float().contiguous()
    return Integers(q, scales, -scales * zero_points.float())
