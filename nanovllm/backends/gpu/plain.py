"""The operations of a step in plain PyTorch. Each takes the same arguments as its kernel.

Read these functions to learn what a kernel computes; read the kernel to learn how. They run on any device, with a loop
over sequences in attention, and over rows in sampling. Tests compare every kernel with its plain version here, and run
the backend with the plain versions. Attention is computed in float32. Everything else rounds where the model's own
layers round.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...engine.int8_blocks import Int8Blocks
from ...engine.kv_cache import FP8, to_fp8
from ...quantization import QuantizedLinear
from ..torch.sampler import RowParams, ban_improbable, sample_from_all, sample_from_top_k
from .tiles import DecodeWorkspace


class PoolSizes(NamedTuple):
    """The sizes that attention needs of a pool."""

    block_size: int
    num_kv_heads: int

    @classmethod
    def of(cls, blocks: Tensor, head_dim: int) -> "PoolSizes":
        """Return the sizes of a pool: KVCache.numbers, which is uint8 if it stores int8."""
        if blocks.dtype == torch.uint8:  # [num_blocks, num_layers, num_kv_heads, block_size * (2 * head_dim + 8)]
            return cls(blocks.shape[3] // (2 * head_dim + 8), blocks.shape[2])
        return cls(blocks.shape[3], blocks.shape[4])


def fill_placeholders(input_ids: Tensor, latest_tokens: Tensor) -> Tensor:
    """Return the ids, with each placeholder ~row, which is negative, replaced by that row's token of the latest step.

    input_ids and the result int64 [num_tokens]; latest_tokens int64 [max_rows]

    >>> fill_placeholders(torch.tensor([7, ~1]), torch.tensor([30, 31])).tolist()
    [7, 31]
    """
    return torch.where(input_ids < 0, latest_tokens.index_select(0, (~input_ids).clamp(min=0)), input_ids)


def embed(input_ids: Tensor, latest_tokens: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write the embeddings of the ids, with placeholders replaced, to `out`.

    input_ids int64 [num_tokens]; latest_tokens int64 [max_rows]; weight [vocab_size, size]; out [num_tokens, size]
    """
    torch.index_select(weight, 0, fill_placeholders(input_ids, latest_tokens), out=out)


class DecodeMetadata(NamedTuple):
    """The sequences of a step that have one query each, in the order in which programs take them."""

    block_tables: Tensor  # int32 [num_tables, max_blocks]
    context_lens: Tensor  # int32 [num_decodes], the longest first
    workspace: DecodeWorkspace  # only the kernel uses it
    rows: Tensor  # int32 [num_decodes], where the queries are in the step
    table_indices: Tensor  # int32 [num_decodes]


class PrefillMetadata(NamedTuple):
    """The sequences of a step that have several queries.

    `tiles` covers only these sequences. The other tensors cover all sequences of the step.
    """

    block_tables: Tensor  # int32 [num_seqs, max_blocks]
    query_start_loc: Tensor  # int32 [num_seqs + 1]
    context_lens: Tensor  # int32 [num_seqs]
    tiles: Tensor  # int32 [num_tiles, 2], each the index of a sequence and the first row of the tile in q
    rows_per_program: int  # one of PREFILL_ROWS; only the kernel uses it


def paged_decode(q: Tensor, blocks: Tensor, layer: int, decodes: DecodeMetadata, out: Tensor) -> None:
    """Write the attention of one query per sequence to `out`. A row with context length 0 gets zeros.

    q, out [num_rows, num_heads, head_dim]; blocks is KVCache.numbers
    """
    each_decode = zip(decodes.rows.tolist(), decodes.table_indices.tolist(), decodes.context_lens.tolist(), strict=True)
    for row, index, context_len in each_decode:
        k, v = gather(blocks, layer, decodes.block_tables[index], context_len, q.shape[2])
        out[row] = attend(q[row : row + 1], k, v)[0]


def paged_prefill(q: Tensor, blocks: Tensor, layer: int, prefills: PrefillMetadata, out: Tensor) -> None:
    """Write the causal attention of each sequence that has a tile to `out`; leave other sequences' rows unchanged.

    A sequence's queries are the last tokens of its context.

    q, out [num_tokens, num_heads, head_dim]; blocks is KVCache.numbers
    """
    starts = prefills.query_start_loc.tolist()
    for seq in sorted(set(prefills.tiles[:, 0].tolist())):
        tokens = slice(starts[seq], starts[seq + 1])
        k, v = gather(blocks, layer, prefills.block_tables[seq], int(prefills.context_lens[seq]), q.shape[2])
        out[tokens] = attend(q[tokens], k, v)


def gather(blocks: Tensor, layer: int, block_table: Tensor, context_len: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return a copy of a context's keys and values, each [context_len, num_kv_heads, head_dim]. 8 bits become float32.

    block_table [max_blocks]
    """
    block_size = PoolSizes.of(blocks, head_dim).block_size
    table = block_table[: -(-context_len // block_size)].long()
    if blocks.dtype == torch.uint8:
        k, v = Int8Blocks(blocks, block_size, head_dim).read(layer, table, torch.float32)
        return k[:context_len], v[:context_len]
    stored = blocks.view(torch.uint8)[table, layer].view(FP8).float() if blocks.dtype == FP8 else blocks[table, layer]
    k, v = stored.transpose(0, 1).flatten(1, 2)[:, :context_len]
    return k, v


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the causal attention of the last tokens of a context, [num_queries, num_heads, head_dim].

    Each KV head serves num_heads / num_kv_heads consecutive query heads.

    q [num_queries, num_heads, head_dim]; k, v [context_len, num_kv_heads, head_dim]
    """
    num_queries, num_keys, group = len(q), len(k), q.shape[1] // k.shape[1]
    if num_keys == 0:
        return torch.zeros_like(q)
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))  # [context_len, num_heads, head_dim]
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * q.shape[2] ** -0.5  # [num_heads, num_queries, context_len]
    positions = torch.arange(num_keys - num_queries, num_keys, device=q.device)  # [num_queries]
    is_later = torch.arange(num_keys, device=q.device) > positions[:, None]  # [num_queries, context_len]
    weights = scores.masked_fill(is_later, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def rotate_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    blocks: Tensor,
    layer: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    q_out: Tensor,
) -> None:
    """Rotate queries into `q_out` and keys into the pool, and copy values into the pool.

    With norm weights, queries and keys are normalized first. A row with slot -1 is padding: it writes nothing to the
    pool, and zeros to `q_out`.

    qkv [rows, num_heads + 2 * num_kv_heads, head_dim]; cos, sin [max_model_len, head_dim]; positions int64 [rows];
    slot_mapping int64 [rows]; blocks is KVCache.numbers; q_norm, k_norm [head_dim]; q_out [rows, num_heads, head_dim]
    """
    num_heads, head_dim = q_out.shape[1:]
    block_size, num_kv_heads = PoolSizes.of(blocks, head_dim)
    is_row = slot_mapping >= 0  # [rows]
    q, k, v = qkv[is_row].split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    cos, sin = (x[positions[is_row]].to(qkv.dtype)[:, None] for x in (cos, sin))  # [rows, 1, head_dim] each
    q_out.zero_()
    q_out[is_row] = rotate(q, cos, sin)
    slots, k = slot_mapping[is_row], rotate(k, cos, sin)
    if blocks.dtype == torch.uint8:
        Int8Blocks(blocks, block_size, head_dim).write(layer, slots, k, v)
        return
    if blocks.dtype == FP8:
        k, v, blocks = to_fp8(k).view(torch.uint8), to_fp8(v).view(torch.uint8), blocks.view(torch.uint8)
    block, offset = slots // block_size, slots % block_size
    blocks[block, layer, 0, offset], blocks[block, layer, 1, offset] = k, v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding to heads. x [rows, heads, head_dim]; cos, sin [rows, 1, head_dim]."""
    first, second = x.chunk(2, dim=-1)  # [rows, heads, head_dim / 2] each
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm over the last dimension. x [..., size]; weight [size]."""
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    """Add x to `residual` in place and write the norm of the sum to `out`. Without a residual, normalize x.

    x, residual, out [rows, size]; weight [size]
    """
    out.copy_(rms_norm(x if residual is None else residual.add_(x), weight, eps))


def silu_and_mul(gate_up: Tensor, out: Tensor) -> None:
    """Write silu(gate) * up to `out`. gate_up [rows, 2 * size]; out [rows, size]."""
    gate, up = gate_up.chunk(2, dim=-1)  # [rows, size] each
    out.copy_(F.silu(gate) * up)


class NormBefore(NamedTuple):
    """The arguments of a norm before gemv() of one row: add_rms_norm(), except that the sum goes to `total`."""

    residual: Tensor  # [1, size]
    total: Tensor  # [1, size], output: residual + x
    weight: Tensor  # [size]
    eps: float


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, norm: NormBefore | None = None) -> None:
    """Write x @ weight.T + bias to `out`, for one row.

    x [1, size]; weight [outputs, size]; bias [outputs]; out [1, outputs]
    """
    if norm is not None:
        torch.add(norm.residual, x, out=norm.total)
        x = rms_norm(norm.total, norm.weight, norm.eps)
    out.copy_(F.linear(x, weight, bias))


def gated_gemv(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, norm: NormBefore | None = None) -> None:
    """Write silu(gate) * up of a linear layer to `out`, for one row.

    x [1, size]; weight [2 * outputs, size]; bias [2 * outputs]; out [1, outputs]
    """
    gate_up = x.new_empty(1, len(weight))
    gemv(x, weight, bias, gate_up, norm)
    silu_and_mul(gate_up, out)


def gemm(x: Tensor, layer: nn.Linear | QuantizedLinear, out: Tensor) -> None:
    """Write layer(x) to `out`. x [rows, size]; out [rows, outputs]."""
    out.copy_(layer(x))


def sample_rows(logits: Tensor, params: RowParams, workspace: object, tokens: Tensor, out: Tensor) -> None:
    """Choose the same tokens as the plain sampler. Temperature 0 is greedy, and ties then go to the lowest id.

    Write the tokens to `tokens`, and also to `out`, with their log-probabilities under the raw logits. The
    log-probability is NaN if the row contains NaN or +inf, or only -inf. Only the kernel uses `workspace`.

    logits [rows, vocab_size]; tokens int64 [rows]; out float32 [rows, 2], each a token id and a log-probability
    """
    numbers = logits.float()
    tokens.copy_(numbers.argmax(dim=-1))
    for row in params.temperature[:, 0].nonzero()[:, 0].tolist():
        one_row, one_params = numbers[row : row + 1], RowParams(*(column[row : row + 1] for column in params))
        sample = sample_from_top_k if 0 < one_params.top_k < numbers.shape[1] else sample_from_all
        tokens[row] = sample(ban_improbable(one_row, one_params), one_params)[0]
    logprobs = numbers.gather(1, tokens[:, None])[:, 0] - numbers.logsumexp(dim=-1)  # [rows]
    out.copy_(torch.stack((tokens.float(), logprobs), dim=1))
