"""A first launch of every kernel that an engine's steps will need, on rows of padding.

A kernel that cannot be compiled fails here, not at the first request, and no request waits for the compiler later: each
form of a kernel, for another type or another constant, is compiled when it is first launched.
"""

import torch
from torch import Tensor

from ...llama import LlamaForCausalLM
from ..torch.attention import AttentionMetadata
from .attention import KernelAttention, Pool
from .inputs import NO_SLOT
from .split import DecodeRoom, LikeliestRoom

NOTHING = torch.empty(0, dtype=torch.int64)


def try_kernels(model: LlamaForCausalLM, pool: Pool, attention: KernelAttention) -> None:
    """Launch them all, and wait until they have run. `model` has a FusedModel in it."""
    device = pool.blocks.device
    tables = torch.zeros(2, 2, dtype=torch.int64, device=device)  # block 0 is read, none is written
    slots = torch.full((3,), NO_SLOT, dtype=torch.int64, device=device)
    step = AttentionMetadata([0, 2, 3], [2, 1], tables, slots, NOTHING)  # a chunk of two tokens, and a decode
    zeros = torch.zeros(3, dtype=torch.int64, device=device)  # the ids and the positions
    logits = model.compute_logits(model(zeros, zeros, attention.plan(step)))  # [3, vocab_size]
    for each in (logits, logits.float()):  # a step's own, and what processors make of them
        told = torch.empty(3, 3, dtype=torch.float32, device=device)
        pool.ops.find_likeliest(each, LikeliestRoom(3, each.shape[1], device), told)
    for num_splits in (1, 2):
        decode_nothing(pool, num_splits)
    told.tolist()


def decode_nothing(pool: Pool, num_splits: int) -> Tensor:
    """Decode a row of padding, [1, num_heads, head_dim]."""
    blocks, head_dim = pool.blocks, pool.blocks.shape[5]
    table, lens = torch.zeros(2, 1, dtype=torch.int32, device=blocks.device)
    q = blocks.new_zeros(1, pool.num_heads, head_dim)
    room = DecodeRoom(1, pool.num_heads, head_dim, num_splits, blocks.device)
    pool.ops.paged_decode(q, blocks, 0, table[None], lens, room, out := torch.empty_like(q))
    return out
