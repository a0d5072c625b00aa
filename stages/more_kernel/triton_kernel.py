"""The same kernel in Triton, for a GPU: one program for each token and KV head. Triton's interpreter runs it on a CPU.

The loop is that of paged_kernel.py. What is a loop there over heads, keys or the numbers of a key is a tensor here,
whose elements the threads of a program share. Sizes of tensors are powers of two, and masks hide what is too much.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["layer", "max_blocks"])
def attend_item(
    out, q, blocks, block_tables, seqs, context_lens, layer, num_layers, max_blocks, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, DIMS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Let a token attend with the query heads that share a KV head. HEADS, DIMS and SLOTS are padded sizes."""
    token, kv_head = tl.program_id(0), tl.program_id(1)
    head, dim, slot = tl.arange(0, HEADS), tl.arange(0, DIMS), tl.arange(0, SLOTS)
    is_dim = (dim < HEAD_DIM)[None, :]
    is_part = (head < GROUP)[:, None] & is_dim
    places = ((token * NUM_KV_HEADS + kv_head) * GROUP + head[:, None]) * HEAD_DIM + dim[None, :]  # in q and out
    query = tl.load(q + places, mask=is_part, other=0.0).to(tl.float32) * scale  # [HEADS, DIMS]
    sums = tl.zeros([HEADS, DIMS], tl.float32)
    totals = tl.zeros([HEADS], tl.float32)
    highest = tl.full([HEADS], float("-inf"), tl.float32)
    context_len, table = tl.load(context_lens + token), block_tables + tl.load(seqs + token) * max_blocks
    for start in range(0, context_len, BLOCK_SIZE):
        block = tl.load(table + start // BLOCK_SIZE)
        is_seen = (slot < BLOCK_SIZE) & (start + slot < context_len)
        first = ((block * num_layers + layer) * 2 * BLOCK_SIZE + slot) * NUM_KV_HEADS + kv_head
        keys, is_loaded = blocks + first[:, None] * HEAD_DIM + dim[None, :], is_seen[:, None] & is_dim
        values = keys + BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM
        k = tl.load(keys, mask=is_loaded, other=0.0).to(tl.float32)  # [SLOTS, DIMS]
        v = tl.load(values, mask=is_loaded, other=0.0).to(tl.float32)
        scores = tl.sum(query[:, None, :] * k[None, :, :], 2)  # [HEADS, SLOTS]
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, 1))
        share, weights = tl.exp(highest - top), tl.exp(scores - top[:, None])
        totals = totals * share + tl.sum(weights, 1)
        sums = sums * share[:, None] + tl.sum(weights[:, :, None] * v[None, :, :], 1)
        highest = top
    tl.store(out + places, (sums / totals[:, None]).to(out.dtype.element_ty), mask=is_part)


def paged_attention(
    out: Tensor, q: Tensor, blocks: Tensor, block_tables: Tensor, seqs: Tensor, context_lens: Tensor, *, layer: int
) -> None:
    """Let each token attend to the first context_lens[token] tokens of its sequence, as paged_kernel.py does.

    The shapes are the same. q, out and blocks may have any dtype, and sums are in float32. All tensors are contiguous.
    """
    num_tokens, num_kv_heads, group, head_dim = q.shape
    _, num_layers, _, block_size, _, _ = blocks.shape
    sizes = group, head_dim, block_size
    attend_item[(num_tokens, num_kv_heads)](
        out, q, blocks, block_tables, seqs, context_lens, layer, num_layers, block_tables.shape[1], head_dim**-0.5,
        num_kv_heads, *sizes, *map(triton.next_power_of_2, sizes),
    )  # fmt: skip
