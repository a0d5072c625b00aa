"""Parallel layers: each rank has some of the heads, of the MLP's columns and of the vocabulary's tokens.

    embed_tokens    rows of the vocabulary        zeros for the tokens of other ranks, then one all-reduce
    qkv_proj        rows of some heads            no communication: heads are independent
    o_proj          columns of the same heads     a part of each sum, then one all-reduce
    gate_up_proj    some of the rows              no communication
    down_proj       the matching columns          a part of each sum, then one all-reduce
    lm_head         rows of the vocabulary        the logits are gathered, so that every rank samples the same token

The layout is Megatron-LM's (Shoeybi et al. 2019, arXiv:1909.08053). The model's code does not change: a rank builds the
model from a config with fewer heads, and replaces the four layers that communicate. torch's DTensor would dispatch
every operation of a step in Python, and would untie a tied head.
"""

from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional as F

from ..llama import LlamaForCausalLM, ModelConfig
from ..llama.model import LlamaDecoderLayer
from .rank_group import RankGroup

ROWS = ("q_proj.", "k_proj.", "v_proj.", "gate_proj.", "up_proj.", "embed_tokens.", "lm_head.")
COLUMNS = ("o_proj.weight", "down_proj.weight")


def local_config(model: ModelConfig, world_size: int) -> ModelConfig:
    """Return the config of one rank's part, with the whole vocabulary. If there are too few KV heads, ranks share them.

    Raise ValueError if the heads or the MLP cannot be divided.
    """
    for name in ("num_attention_heads", "intermediate_size"):
        if getattr(model, name) % world_size:
            raise ValueError(f"tensor_parallel_size must divide {name}, {getattr(model, name)}, got {world_size}")
    kv_heads = model.num_key_value_heads
    if kv_heads % world_size and world_size % kv_heads:
        raise ValueError(
            f"tensor_parallel_size must divide num_key_value_heads, {kv_heads}, or be a multiple, got {world_size}"
        )
    return replace(
        model,
        num_attention_heads=model.num_attention_heads // world_size,
        num_key_value_heads=max(1, kv_heads // world_size),
        intermediate_size=model.intermediate_size // world_size,
    )


def part_of(name: str, shape: tuple[int, ...], model: ModelConfig, ranks: RankGroup) -> tuple[slice, ...]:
    """Return the index of this rank's part of a checkpoint tensor of `shape`. An empty index selects all of it."""
    dim = 0 if any(part in name for part in ROWS) else 1 if name.endswith(COLUMNS) else None
    if dim is None or ranks.world_size == 1:
        return ()
    is_kv = "k_proj." in name or "v_proj." in name
    num_parts = min(ranks.world_size, model.num_key_value_heads) if is_kv else ranks.world_size
    size = cdiv(shape[dim], num_parts)
    start = ranks.rank * num_parts // ranks.world_size * size
    return (slice(None),) * dim + (slice(min(start, shape[dim]), min(start + size, shape[dim])),)


def parallelize(model: LlamaForCausalLM, ranks: RankGroup) -> None:
    """Replace the layers that communicate, before weights are loaded. The model must be built from local_config()."""
    embedding = model.model.embed_tokens
    model.model.embed_tokens = VocabParallelEmbedding(embedding.num_embeddings, embedding.embedding_dim, ranks)
    model.lm_head = VocabParallelHead(model.lm_head.in_features, model.lm_head.out_features, ranks)
    model.tie_weights()
    for layer in model.model.layers:
        assert isinstance(layer, LlamaDecoderLayer), "a layer of another class"
        layer.self_attn.o_proj = RowParallelLinear(layer.self_attn.o_proj, ranks)
        layer.mlp.down_proj = RowParallelLinear(layer.mlp.down_proj, ranks)


class RowParallelLinear(nn.Linear):
    """A linear layer whose inputs are split over the ranks. Each rank has the weight's columns for its inputs."""

    def __init__(self, local: nn.Linear, ranks: RankGroup) -> None:
        super().__init__(local.in_features, local.out_features, local.bias is not None)
        self._ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, [num_tokens, out_features], for x [num_tokens, in_features]."""
        out = F.linear(x, self.weight)
        self._ranks.all_reduce(out)
        return out if self.bias is None else out + self.bias  # after the sum, so that it counts only once


class VocabParallelEmbedding(nn.Embedding):
    """An embedding whose rows are split over the ranks. The last ranks may be padded with rows of zeros."""

    def __init__(self, vocab_size: int, hidden_size: int, ranks: RankGroup) -> None:
        super().__init__(cdiv(vocab_size, ranks.world_size), hidden_size)
        self._ranks = ranks

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return [num_tokens, hidden_size] for int64 [num_tokens]. Exactly one rank has each token's row."""
        rows = input_ids - self._ranks.rank * self.num_embeddings
        is_local = (rows >= 0) & (rows < self.num_embeddings)
        out = F.embedding(rows.where(is_local, 0), self.weight).where(is_local.unsqueeze(1), 0)
        self._ranks.all_reduce(out)
        return out


class VocabParallelHead(nn.Linear):
    """A head whose rows are split over the ranks, as in VocabParallelEmbedding, so that the two can be tied."""

    def __init__(self, hidden_size: int, vocab_size: int, ranks: RankGroup) -> None:
        super().__init__(hidden_size, cdiv(vocab_size, ranks.world_size), bias=False)
        self._ranks, self._vocab_size = ranks, vocab_size

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary, [num_rows, vocab_size], for x [num_rows, hidden_size]."""
        return self._ranks.gather(F.linear(x, self.weight))[:, : self._vocab_size]


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)
