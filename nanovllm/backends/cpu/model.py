"""The model for steps of many rows: fused layers instead of a LlamaModel's, on the same weights.

    norm -> qkv -> rotate, write, attend -> o -> add, norm -> gate and up -> silu, multiply -> down -> (add, norm)

A layer is four packed linear layers and four compiled calls between them. Adding a layer's output to the residual is
fused with the norm after it, in one pass over the rows. The residual is float32, whatever the weights are. Two buffers
serve all layers.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ...llama import LlamaForCausalLM
from .elementwise import add_and_norm, silu_and_mul
from .matmul import PackedEmbedding, PackedLinear, why_not_packed
from .step_attention import StepAttend, StepAttention
from .threads import is_forked
from .vectors import like_of

if TYPE_CHECKING:
    from ...engine.kv_cache import KVCache

PADDED = 16  # rows are padded to a multiple: plain linear layers generate, and keep, code for each number of rows
LAYERS = ("embed_tokens", "qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")


class Layer(NamedTuple):
    """The parts of a layer."""

    qkv: nn.Module
    o: nn.Module
    gate_up: nn.Module
    down: nn.Module
    norm: int  # address of float32 [hidden_size], like mlp_norm
    mlp_norm: int
    head_norms: int  # address of float32 [2, head_dim], or 0


class CpuModel(nn.Module):
    """A LlamaModel with fused layers, which shares the weights of the plain one."""

    def __init__(self, model: LlamaForCausalLM, workers: int) -> None:
        super().__init__()
        self.plain = model.model
        self.config = model.config
        self._workers = workers
        self._kept: list[Tensor] = []  # tensors whose addresses the layers hold
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
        """Return the hidden states [num_tokens, hidden_size]. `input_ids` and `positions` are int64 [num_tokens]."""
        config, like, workers, rows = self.config, self._like, self._workers, len(input_ids)
        size, eps, middle = config.hidden_size, config.rms_norm_eps, config.intermediate_size
        x = self.plain.embed_tokens(input_ids).float()  # [num_tokens, hidden_size]
        padded = -(-rows // self._padded) * self._padded  # results of the extra rows are never read
        normed = torch.empty(padded, size, dtype=self._dtype)
        heads = torch.empty(padded, config.num_attention_heads * config.head_dim, dtype=self._dtype)
        act = torch.empty(padded, middle, dtype=self._dtype)
        at_x, at_y, at_normed, at_act = x.data_ptr(), 0, normed.data_ptr(), act.data_ptr()
        for number, layer in enumerate(self._layers):
            add_and_norm(at_x, at_y, layer.norm, eps, rows, size, workers, like, at_normed)
            attend.attend(number, layer.qkv(normed), layer.head_norms, 1, heads)
            y = layer.o(heads)  # [padded, hidden_size]
            add_and_norm(at_x, y.data_ptr(), layer.mlp_norm, eps, rows, size, workers, like, at_normed)
            gate_up = layer.gate_up(normed)  # [padded, 2 * intermediate_size]
            silu_and_mul(gate_up.data_ptr(), rows, middle, workers, like, at_act)
            y = layer.down(act)  # [padded, hidden_size]
            at_y = y.data_ptr()
        add_and_norm(at_x, at_y, self._norm, eps, rows, size, workers, like, at_normed)
        return normed[:rows]


def swap_in(model: LlamaForCausalLM, kv_cache: "KVCache", workers: int, packs: bool | None = None) -> StepAttention:
    """Swap submodules of `model`, and return the attention backend for it. Weights are packed in place.

    `workers` is the number of threads of a kernel. `packs` says whether to pack the weights; None packs them where
    why_not_packed() allows it.
    """
    if packs is None:
        packs = why_not_packed(model) is None
    if packs:
        pack_weights(model)
    plain = model.model
    model.register_module("model", CpuModel(model, workers))
    dtype, rotary, config = kv_cache.blocks.dtype, plain.rotary_emb, model.config
    cos, sin = rotary.cos.to(dtype), rotary.sin.to(dtype)
    return StepAttention(kv_cache, config.num_attention_heads, cos, sin, config.rms_norm_eps, workers)


def swap_out(model: LlamaForCausalLM) -> None:
    """Undo swap_in(), even one that raised halfway. In a forked child, layers unpack themselves when they are used."""
    model.register_module("model", getattr(model.model, "plain", model.model))
    if not is_forked():
        unpack_weights(model)


def pack_weights(model: LlamaForCausalLM) -> None:
    """Pack the weights of all linear layers in place."""
    swap_layers(model, lambda layer: PackedLinear(layer) if isinstance(layer, nn.Linear) else layer)
    embedding, head = model.model.embed_tokens, model.lm_head
    if model.config.tie_word_embeddings and isinstance(head, PackedLinear):
        model.model.register_module("embed_tokens", PackedEmbedding(embedding, head))


def unpack_weights(model: LlamaForCausalLM) -> None:
    """Undo pack_weights(), even one that raised halfway."""
    swap_layers(model, lambda layer: layer.unpack() if isinstance(layer, PackedLinear | PackedEmbedding) else layer)


def swap_layers(model: LlamaForCausalLM, swap: Callable[[nn.Module], nn.Module]) -> None:
    """Replace each layer of `model` that has a matrix by what `swap` returns for it."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if name in LAYERS:
                parent.register_module(name, swap(layer))
