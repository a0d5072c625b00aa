"""KVCache: the pool, two tensors for all keys and values of all sequences, and PoolReport: what of it is in use."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .config import EngineConfig
from .llama import ModelConfig

DEFAULT_BYTES = 2**30
DEFAULT_GPU_MEMORY_UTILIZATION = 0.9


class KVCache:
    """Room for the keys and values of `num_slots` tokens, allocated once. Raises ValueError if they do not fit.

    k, v   [num_layers, num_slots, num_kv_heads, head_dim]
    """

    def __init__(self, model: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_slots = num_slots
        self.bytes_per_token = bytes_per_token(model, dtype)
        shape = (model.num_hidden_layers, num_slots, model.num_key_value_heads, model.head_dim)
        try:
            self.k = torch.empty(shape, dtype=dtype, device=device)
            self.v = torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError:
            size = num_slots * self.bytes_per_token
            raise ValueError(f"{device} has no room for a pool of {num_slots:,} slots, {size:,} bytes") from None

    def write(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Token i goes to slot slot_mapping[i]. slot_mapping [num_tokens]; k, v [num_tokens, num_kv_heads, head_dim]"""
        assert k.shape == v.shape == (len(slot_mapping), *self.k.shape[2:]), (k.shape, v.shape, slot_mapping.shape)
        self.k[layer].index_copy_(0, slot_mapping, k)
        self.v[layer].index_copy_(0, slot_mapping, v)

    def read(self, layer: int, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `length` slots from `start`, [length, num_kv_heads, head_dim] each: a view, not a copy."""
        return self.k[layer, start : start + length], self.v[layer, start : start + length]


def bytes_per_token(model: ModelConfig, dtype: torch.dtype) -> int:
    """A key and a value for each KV head of each layer."""
    return 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * dtype.itemsize


def num_slots_for(config: EngineConfig, model: ModelConfig, max_model_len: int, device: torch.device) -> int:
    """The pool's size in slots, from whichever knob was given; call it once the weights are loaded.

    Without a knob, a GPU gives 90% of its memory to weights and pool (the rest is for activations); elsewhere the
    pool has 1 GiB, or what max_num_seqs sequences can fill if that is less. Raises ValueError if no slot fits.
    """
    per_token = bytes_per_token(model, config.torch_dtype(model.dtype))
    if config.kv_cache_tokens is not None:
        room = config.kv_cache_tokens * per_token
    elif config.kv_cache_memory_bytes is not None:
        room = config.kv_cache_memory_bytes
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        share = config.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION
        room = int(share * total) - (total - free)
    elif config.gpu_memory_utilization is not None:
        raise ValueError(f"gpu_memory_utilization is for cuda, not {device.type}: give kv_cache_tokens")
    else:
        room = min(DEFAULT_BYTES, config.max_num_seqs * max_model_len * per_token)
    if room < per_token:
        raise ValueError(f"a token takes {per_token:,} bytes of KV pool, the pool would have {room:,}")
    return room // per_token


@dataclass(frozen=True)
class PoolReport:
    """The pool at one moment, in slots.

        ####------------##--------------................
        #  used: keys and values are there      -  held - used: wasted inside      .  free

    A hole is a free piece with a holder behind it. Free slots may lie in many pieces: largest_free is the largest one.
    """

    num_slots: int
    promised: int  # what the sequences may come to need: prompt + max_tokens of each
    pieces: tuple[tuple[int, int, int], ...]  # (start, size, used) of each holder, by start
    largest_free: int
    holes: int  # free pieces with a holder behind them

    @property
    def held(self) -> int:
        return sum(size for _, size, _ in self.pieces)

    @property
    def used(self) -> int:
        return sum(used for _, _, used in self.pieces)

    @property
    def wasted(self) -> int:
        return self.held - self.used

    def strip(self, width: int = 48) -> str:
        """The pool in `width` characters, as above. A character shows what most of its slots are.

        >>> PoolReport(8, promised=4, pieces=((0, 4, 2),), largest_free=4, holes=0).strip(width=8)
        '##--....'
        """
        cells = ["."] * self.num_slots
        for start, size, used in self.pieces:
            cells[start : start + size] = "#" * used + "-" * (size - used)
        edges = [i * self.num_slots // width for i in range(width + 1)]
        groups = [cells[a:b] for a, b in pairwise(edges) if b > a]
        return "".join(max("#-.", key=group.count) for group in groups)
