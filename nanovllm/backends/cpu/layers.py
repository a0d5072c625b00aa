"""A model's layers for steps of many rows: four packed linear layers, and four compiled calls between them, each.

    norm -> qkv -> rotate, write, attend -> o -> add, norm -> gate and up -> silu, multiply -> down -> (add, norm)

The sum of a layer's output and the residual belongs to the norm behind it: one walk over the rows does both. The
residual is float32, whatever the weights are. Two buffers serve all layers.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor, nn

from ...llama import LlamaForCausalLM
from . import activation
from .packed import PackedLinear
from .plan import StepAttend, like_of
from .vectors import (
    ENTRY,
    OPTIONS,
    WIDTH,
    Memory,
    add,
    at,
    floats,
    fma,
    load,
    multiply,
    read,
    splat,
    store,
    stored,
    sum_of,
    write,
    zeros,
)

ENOUGH = 1 << 15  # numbers: a kernel with less to do is done before another thread has woken up
PADDED = 16  # rows: a plain layer's library makes, and keeps, code for each number of rows that it meets


@njit(parallel=True, **ENTRY)
def add_and_norm(
    x: int, y: int, weight: int, eps: float, rows: int, size: int, workers: int, like: np.ndarray, out: int
) -> None:
    """x += y, then out = x / rms(x) * weight.

    Addresses: x float32 [rows, size]; y, out [rows, size]; weight float32 [size]. y 0: nothing is added.
    like: an array of the type of y and out
    """
    if workers == 1 or rows * size < ENOUGH:
        add_and_norm_rows(x, y, weight, eps, 0, rows, size, like, out)
    else:
        each = -(-rows // (4 * workers))
        for piece in prange(-(-rows // each)):
            add_and_norm_rows(x, y, weight, eps, piece * each, min(piece * each + each, rows), size, like, out)


@njit(**OPTIONS)
def add_and_norm_rows(
    x: int, y: int, weight: int, eps: float, start: int, end: int, size: int, like: np.ndarray, out: int
) -> None:
    for row in range(start, end):
        add_and_norm_row(
            at(floats(x), row * size), y, floats(weight), eps, row * size, size, like, at(stored(out, like), row * size)
        )


@njit(**OPTIONS)
def add_and_norm_row(
    x: Memory, y: int, weight: Memory, eps: float, where: int, size: int, like: np.ndarray, out: Memory
) -> None:
    squares, total, i, more = zeros(), np.float32(0), 0, at(stored(y, like), where)
    while i + WIDTH <= size:
        numbers = load(x, i)
        if y:
            numbers = add(numbers, load(more, i))
            store(x, i, numbers)
        squares = fma(numbers, numbers, squares)
        i += WIDTH
    while i < size:
        if y:
            write(x, i, read(x, i) + read(more, i))
        total += read(x, i) * read(x, i)
        i += 1
    scale = np.float32(1) / np.sqrt((total + sum_of(squares)) / np.float32(size) + np.float32(eps))
    i = 0
    while i + WIDTH <= size:
        store(out, i, multiply(multiply(load(x, i), splat(scale)), load(weight, i)))
        i += WIDTH
    while i < size:
        write(out, i, read(x, i) * scale * read(weight, i))
        i += 1


@njit(parallel=True, **ENTRY)
def silu_and_mul(gate_up: int, rows: int, size: int, workers: int, like: np.ndarray, act: int) -> None:
    """act = silu(gate) * up. Addresses: gate_up [rows, 2, size]; act [rows, size]; like: an array of their type"""
    if workers == 1 or rows * size < ENOUGH:
        silu_and_mul_rows(stored(gate_up, like), 0, rows, size, stored(act, like))
    else:
        each = -(-rows // (4 * workers))
        for piece in prange(-(-rows // each)):
            silu_and_mul_rows(
                stored(gate_up, like), piece * each, min(piece * each + each, rows), size, stored(act, like)
            )


@njit(**OPTIONS)
def silu_and_mul_rows(gate_up: Memory, start: int, end: int, size: int, act: Memory) -> None:
    for row in range(start, end):
        gate = at(gate_up, row * 2 * size)
        activation.silu_and_mul(gate, at(gate, size), size, at(act, row * size))


class Layer(NamedTuple):
    qkv: nn.Module
    o: nn.Module
    gate_up: nn.Module
    down: nn.Module
    norm: int  # address of float32 [hidden_size], as the next
    mlp_norm: int
    head_norms: int  # address of float32 [2, head_dim]; 0: none


class ManyRows(nn.Module):
    """In place of a LlamaModel: the same weights."""

    def __init__(self, model: LlamaForCausalLM, workers: int) -> None:
        super().__init__()
        self.config, self.embed_tokens = model.config, model.model.embed_tokens
        self._workers = workers
        self._kept: list[Tensor] = []  # whose addresses the layers know
        self._layers = [self._layer(layer) for layer in model.model.layers]
        self._norm = self._float(model.model.norm.weight)
        self._dtype = model.lm_head.weight.dtype
        self._like = like_of(self._dtype)
        is_packed = isinstance(model.lm_head, PackedLinear)
        self._padded = 1 if is_packed or self._dtype == torch.float32 else PADDED

    def _float(self, *weights: Tensor) -> int:
        self._kept.append(torch.cat([weight.detach().float() for weight in weights]))
        return self._kept[-1].data_ptr()

    def _layer(self, layer: Any) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        linears = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
        norms = self._float(layer.input_layernorm.weight), self._float(layer.post_attention_layernorm.weight)
        head_norms = self._float(attention.q_norm.weight, attention.k_norm.weight) if attention.qk_norm else 0
        return Layer(*linears, *norms, head_norms)

    def forward(self, input_ids: Tensor, positions: Tensor, attend: StepAttend) -> Tensor:
        """input_ids, positions int64 [num_tokens] -> [num_tokens, hidden_size]"""
        config, like, workers, rows = self.config, self._like, self._workers, len(input_ids)
        size, eps, middle = config.hidden_size, config.rms_norm_eps, config.intermediate_size
        x = self.embed_tokens(input_ids).float()  # [num_tokens, hidden_size]
        room = -(-rows // self._padded) * self._padded  # nobody reads what layers make of the last ones
        normed = torch.empty(room, size, dtype=self._dtype)
        heads = torch.empty(room, config.num_attention_heads * config.head_dim, dtype=self._dtype)
        act = torch.empty(room, middle, dtype=self._dtype)
        at_x, at_y, at_normed, at_act = x.data_ptr(), 0, normed.data_ptr(), act.data_ptr()
        for number, layer in enumerate(self._layers):
            add_and_norm(at_x, at_y, layer.norm, eps, rows, size, workers, like, at_normed)
            attend.attend(number, layer.qkv(normed), layer.head_norms, 1, heads)
            y = layer.o(heads)  # [room, hidden_size]
            add_and_norm(at_x, y.data_ptr(), layer.mlp_norm, eps, rows, size, workers, like, at_normed)
            gate_up = layer.gate_up(normed)  # [room, 2 * intermediate_size]
            silu_and_mul(gate_up.data_ptr(), rows, middle, workers, like, at_act)
            y = layer.down(act)  # [room, hidden_size]
            at_y = y.data_ptr()
        add_and_norm(at_x, at_y, self._norm, eps, rows, size, workers, like, at_normed)
        return normed[:rows]
