"""FusedModel: a LlamaModel whose layers are four matmuls each, and five kernels between them.

    residual += x, norm            one kernel, seven plain operations
    qkv_proj
    norm of heads, rotation, write one kernel, a dozen plain operations and the copy into the pool
    attention
    o_proj
    residual += x, norm
    gate_up_proj
    silu(gate) * up                one kernel, or for one row a part of gate_up_proj's
    down_proj

The weights, and the modules that hold them, are the plain model's.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ...llama import LlamaForCausalLM
from .linear import Linears
from .ops import Ops


class FusedModel(nn.Module):
    def __init__(self, model: Any, ops: Ops, linears: Linears) -> None:
        """Take the layers of a LlamaModel; it stays as it is."""
        super().__init__()
        self.plain, self._ops, self._linears = model, ops, linears

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Any) -> Tensor:
        """input_ids, positions int64 [num_tokens]; attend: a KernelAttend -> [num_tokens, hidden_size]"""
        residual = self.plain.embed_tokens(input_ids)  # [num_tokens, hidden_size]
        x: Tensor | None = None  # to be added to the residual
        for layer in self.plain.layers:
            x = self._attention(layer, self._norm(x, residual, layer.input_layernorm), positions, attend)
            x = self._mlp(layer.mlp, self._norm(x, residual, layer.post_attention_layernorm))
        return self._norm(x, residual, self.plain.norm)

    def _norm(self, x: Tensor | None, residual: Tensor, norm: Any) -> Tensor:
        """Return the norm of `residual`, once x has been added to it. All [num_tokens, hidden_size]"""
        out = torch.empty_like(residual)
        if x is None:
            self._ops.add_rms_norm(residual, None, norm.weight, norm.eps, out)
        else:
            self._ops.add_rms_norm(x, residual, norm.weight, norm.eps, out)
        return out

    def _attention(self, layer: Any, x: Tensor, positions: Tensor, attend: Any) -> Tensor:
        """x, out [num_tokens, hidden_size]"""
        part = layer.self_attn
        qkv = self._linears(part.qkv_proj, x).unflatten(1, (-1, part.head_dim))  # [num_tokens, all heads, head_dim]
        norms = (part.q_norm, part.k_norm) if part.qk_norm else (None, None)
        return self._linears(part.o_proj, attend(part.layer, qkv, positions, *norms).flatten(1))

    def _mlp(self, mlp: Any, x: Tensor) -> Tensor:
        """x, out [num_tokens, hidden_size]"""
        return self._linears(mlp.down_proj, self._linears.gated(mlp.gate_up_proj, x))


def swap_in(model: LlamaForCausalLM, ops: Ops, linears: Linears) -> None:
    model.model = FusedModel(model.model, ops, linears)  # type: ignore[assignment]


def swap_out(model: LlamaForCausalLM) -> None:
    """Undo swap_in()."""
    now: Any = model.model
    model.model = getattr(now, "plain", now)
