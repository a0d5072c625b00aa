"""Llama and its close relatives on flat tokens: the part of an engine that never changes.

    hidden = model(input_ids, positions, attend)
    logits = model.compute_logits(hidden[rows])  # only for the rows after which a token is sampled

The tokens of all sequences lie end to end, in one dimension. Everything here treats each token independently, except
for attention, which the caller passes in: `attend` stores this step's keys and values, and lets each token attend to
the tokens that it may see.

Every matmul, norm, rotation and activation is a submodule, so a backend can replace it (packed, fused, sharded) without
a change in this file. Names follow transformers' Llama, except that q, k and v are one matmul, qkv_proj, and gate and
up another, gate_up_proj, as in vLLM.
"""

import math
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import ModelConfig, RopeScaling


class Attend(Protocol):
    """Attention of one step. q, out [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim]."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class RMSNorm(nn.Module):
    """x / rms(x) * weight, with the division in float32 (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Return x, [num_tokens, size] or [num_tokens, num_heads, size], normalized over its last dimension."""
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return the angle by which one position rotates each pair of a head, float32 [head_dim / 2].

    Llama 3.1 divides low frequencies by `factor`, keeps high ones, and interpolates in between.

    >>> rope_frequencies(4, 10000.0, None).tolist()
    [1.0, 0.009999999776482582]
    >>> rope_frequencies(4, 10000.0, RopeScaling(factor=2.0)).tolist()
    [0.5, 0.004999999888241291]
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim  # [head_dim / 2]
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    rotations = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # in the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((rotations - low) / (high - low)).clamp(0, 1)  # 1 for a high frequency, 0 for a low one
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


class RotaryEmbedding(nn.Module):
    """Cosines and sines of every position's angles (Su et al. 2021, arXiv:2104.09864), computed once in float32."""

    cos: Tensor  # [max_model_len, head_dim]
    sin: Tensor  # [max_model_len, head_dim]

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__()
        # on the CPU even under torch.device("meta"), because checkpoints don't contain the cosines and sines
        frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        positions = torch.arange(max_model_len, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, frequencies).repeat(1, 2)  # for both halves of a head
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [num_tokens, 1, head_dim] of int64 positions [num_tokens], for every head and layer."""
        return self.cos.index_select(0, positions).unsqueeze(1), self.sin.index_select(0, positions).unsqueeze(1)


class Rotate(nn.Module):
    """The rotation of each pair (x[i], x[i + head_dim / 2]) of a head by the angle of its position."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return x, [num_tokens, any number of heads, head_dim], rotated; cos and sin are [num_tokens, 1, head_dim]."""
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin


class SiluAndMul(nn.Module):
    """silu(gate) * up (the SwiGLU of Shazeer 2020, arXiv:2002.05202)."""

    def forward(self, gate_up: Tensor) -> Tensor:
        """Return [num_tokens, intermediate_size] for gate_up [num_tokens, 2 * intermediate_size]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


class LlamaAttention(nn.Module):
    """Self-attention. It passes keys and values to `attend`, and does not keep them."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, q_size + 2 * kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.attention_output_bias)
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.rotate = Rotate()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Return self-attention applied to x [num_tokens, hidden_size], in the same shape."""
        qkv = self.qkv_proj(x).unflatten(1, (-1, self.head_dim))  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
        qk, v = qkv.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.qk_norm:  # for each head separately
            q, k = qk.split((self.num_heads, self.num_kv_heads), dim=1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        qk = self.rotate(qk, cos, sin)  # queries and keys together
        q, k = qk.split((self.num_heads, self.num_kv_heads), dim=1)
        out = attend(self.layer, q, k, v)  # [num_tokens, num_heads, head_dim]
        assert out.shape == q.shape, f"attend turned {tuple(q.shape)} into {tuple(out.shape)}"
        return self.o_proj(out.flatten(1))


class LlamaMLP(nn.Module):
    """The feed-forward part of a layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP applied to x [num_tokens, hidden_size], in the same shape."""
        return self.down_proj(self.act(self.gate_up_proj(x)))


class LlamaDecoderLayer(nn.Module):
    """Attention and feed-forward, each applied to its normed input and added to the residual."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Return x [num_tokens, hidden_size] with attention and feed-forward added."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    """The embedding, the layers and the final norm."""

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config, max_model_len)

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return hidden [num_tokens, hidden_size] for input_ids and positions, int64 [num_tokens]."""
        x = self.embed_tokens(input_ids)  # [num_tokens, hidden_size]
        cos, sin = self.rotary_emb(positions)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)


class LlamaForCausalLM(nn.Module):
    """Llama (Touvron et al. 2023, arXiv:2302.13971 and arXiv:2307.09288), Mistral, Qwen 2.5 and Qwen 3."""

    def __init__(self, config: ModelConfig, max_model_len: int | None = None) -> None:
        """Build the model for texts of up to `max_model_len` tokens. Default: max_position_embeddings."""
        super().__init__()
        self.config = config
        self.model = LlamaModel(config, max_model_len or config.max_position_embeddings)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Share the embedding's weight with the head, if the config ties them."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return hidden [num_tokens, hidden_size] for input_ids and positions, int64 [num_tokens]."""
        assert input_ids.dim() == 1 and input_ids.shape == positions.shape, (input_ids.shape, positions.shape)
        return self.model(input_ids, positions, attend)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [num_rows, vocab_size] for hidden [num_rows, hidden_size], the rows to sample from."""
        return self.lm_head(hidden)
