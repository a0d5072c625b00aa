"""The path of steps of many rows: what is swapped into a model, and the attention backend that goes with it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from ...llama import LlamaForCausalLM
from .layers import ManyRows
from .packed import PackedLinear, why_not_packed
from .plan import StepAttention

if TYPE_CHECKING:
    from ...engine.kv_cache import KVCache

LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def swap_in(model: LlamaForCausalLM, kv_cache: "KVCache", workers: int, packs: bool | None = None) -> StepAttention:
    """Change the submodules of `model`; its weights stay as they are. Returns the attention backend for it.

    workers: threads of a kernel. packs: whether weights are packed; None: where they can be, see why_not_packed()
    """
    if packs is None:
        packs = why_not_packed(model) is None
    if packs:
        swap_linears(model, PackedLinear)
    plain = model.model
    model.model = ManyRows(model, workers)
    model.model.plain = plain
    dtype, rotary, config = kv_cache.blocks.dtype, plain.rotary_emb, model.config
    cos, sin = rotary.cos.to(dtype), rotary.sin.to(dtype)
    return StepAttention(kv_cache, config.num_attention_heads, cos, sin, config.rms_norm_eps, workers)


def swap_out(model: LlamaForCausalLM) -> None:
    """Undo swap_in(), also one that raised half way."""
    now: Any = model.model
    model.model = getattr(now, "plain", now)
    swap_linears(model, lambda linear: linear.plain if isinstance(linear, PackedLinear) else linear)


def swap_linears(model: LlamaForCausalLM, swap: Callable[[nn.Module], nn.Module]) -> None:
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, linear in list(part.named_children()):
                if name in LINEARS:
                    setattr(part, name, swap(linear))
    model.lm_head = swap(model.lm_head)
