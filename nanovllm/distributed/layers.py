"""Parallel layers: each rank has some of the attention heads, of the MLP's hidden units and of the vocabulary's tokens.

    layer           a rank's part of the weight   how the ranks communicate
    embed_tokens    the rows of some tokens       zeros for the tokens of other ranks, then one all-reduce
    qkv_proj        the rows of some heads        no communication: heads are independent
    o_proj          the columns of these heads    a part of each sum, then one all-reduce
    gate_up_proj    the rows of some units        no communication: units are independent
    down_proj       the columns of these units    a part of each sum, then one all-reduce
    lm_head         the rows of some tokens       the logits are gathered, so that every rank samples the same token

The layout is Megatron-LM's (Shoeybi et al. 2019, arXiv:1909.08053). The model's code does not change: a rank builds the
model from a config with fewer heads, and replaces the four kinds of layers that communicate. torch's DTensor is not
used, because it would dispatch every operation of a step in Python, and would untie a tied head.
"""

from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional as F

from ..llama import LlamaForCausalLM, ModelConfig
from ..llama.model import LlamaDecoderLayer
from .rank_group import RankGroup

# Names of the tensors whose rows, or whose columns, are divided among the ranks
SPLIT_BY_ROWS = ("q_proj.", "k_proj.", "v_proj.", "gate_proj.", "up_proj.", "embed_tokens.", "lm_head.")
SPLIT_BY_COLUMNS = ("o_proj.weight", "down_proj.weight")


def local_config(config: ModelConfig, world_size: int) -> ModelConfig:
    """Return a rank's config, with its number of heads and MLP units. The other fields are those of the whole model.

    If there are more ranks than KV heads, several ranks have the same KV head. Raise ValueError if the heads or the MLP
    units cannot be divided equally.
    """
    for name in ("num_attention_heads", "intermediate_size"):
        if getattr(config, name) % world_size:
            raise ValueError(f"tensor_parallel_size must divide {name}, {getattr(config, name)}, got {world_size}")
    num_kv_heads = config.num_key_value_heads
    if num_kv_heads % world_size and world_size % num_kv_heads:
        raise ValueError(
            f"tensor_parallel_size must divide num_key_value_heads, {num_kv_heads}, or be a multiple, got {world_size}"
        )
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // world_size,
        num_key_value_heads=max(1, num_kv_heads // world_size),
        intermediate_size=config.intermediate_size // world_size,
    )


def local_slices(name: str, shape: tuple[int, ...], config: ModelConfig, ranks: RankGroup) -> tuple[slice, ...]:
    """Return the slices that select this rank's part of a checkpoint's tensor, or () if the rank needs all of it.

    `shape` and `config` are those of the whole tensor and the whole model.
    """
    dim = 0 if any(part in name for part in SPLIT_BY_ROWS) else 1 if name.endswith(SPLIT_BY_COLUMNS) else None
    if dim is None or ranks.world_size == 1:
        return ()
    is_kv = "k_proj." in name or "v_proj." in name
    num_parts = min(ranks.world_size, config.num_key_value_heads) if is_kv else ranks.world_size
    part_size = cdiv(shape[dim], num_parts)
    start = ranks.rank * num_parts // ranks.world_size * part_size
    return (slice(None),) * dim + (slice(min(start, shape[dim]), min(start + part_size, shape[dim])),)


def parallelize(model: LlamaForCausalLM, ranks: RankGroup) -> None:
    """Replace the layers that communicate in a model built from local_config(). Call this before weights are loaded."""
    embedding = model.model.embed_tokens
    model.model.embed_tokens = VocabParallelEmbedding(embedding.num_embeddings, embedding.embedding_dim, ranks)
    model.lm_head = VocabParallelHead(model.lm_head.in_features, model.lm_head.out_features, ranks)
    model.tie_weights()
    for layer in model.model.layers:
        assert isinstance(layer, LlamaDecoderLayer), "not a LlamaDecoderLayer"
        layer.self_attn.o_proj = RowParallelLinear(layer.self_attn.o_proj, ranks)
        layer.mlp.down_proj = RowParallelLinear(layer.mlp.down_proj, ranks)


class RowParallelLinear(nn.Linear):
    """A linear layer whose inputs are divided among the ranks. Each rank has the weight's columns for its inputs."""

    def __init__(self, linear: nn.Linear, ranks: RankGroup) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self._ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        """Return the whole layer's output, [num_tokens, out_features], for this rank's x [num_tokens, in_features]."""
        out = F.linear(x, self.weight)
        self._ranks.all_reduce(out)
        return out if self.bias is None else out + self.bias  # after the sum, so that it counts only once


class VocabParallelEmbedding(nn.Embedding):
    """An embedding whose rows are divided among the ranks. The parts of the last ranks may end in rows of zeros."""

    def __init__(self, vocab_size: int, hidden_size: int, ranks: RankGroup) -> None:
        super().__init__(cdiv(vocab_size, ranks.world_size), hidden_size)
        self._ranks = ranks

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return embeddings [num_tokens, hidden_size] for int64 [num_tokens]. Exactly one rank has each token's row."""
        local_ids = input_ids - self._ranks.rank * self.num_embeddings
        is_local = (local_ids >= 0) & (local_ids < self.num_embeddings)
        out = F.embedding(local_ids.where(is_local, 0), self.weight).where(is_local.unsqueeze(1), 0)
        self._ranks.all_reduce(out)
        return out


class VocabParallelHead(nn.Linear):
    """A head whose rows are divided as in VocabParallelEmbedding, so that the two can share a weight."""

    def __init__(self, hidden_size: int, vocab_size: int, ranks: RankGroup) -> None:
        super().__init__(hidden_size, cdiv(vocab_size, ranks.world_size), bias=False)
        self._ranks, self._vocab_size = ranks, vocab_size

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary, [num_rows, vocab_size], for x [num_rows, hidden_size]."""
        return self._ranks.gather(F.linear(x, self.weight), self._vocab_size)


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)
