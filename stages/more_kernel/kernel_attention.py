"""KernelAttention: an attention backend that copies nothing. Its kernel reads the blocks where they are."""

from itertools import pairwise

import numba
import torch
from torch import Tensor

from . import paged_kernel
from .attention import AttentionMetadata, PagedAttention
from .kv_cache import KVCache
from .llama import Attend


class KernelAttention:
    """One kernel for any mixture of prompts, chunks and decodes: no tile, no padding, and no block to clear."""

    def __init__(self, kv_cache: KVCache) -> None:
        """Launch Numba's threads. They share a pool with torch, which would have as many from now on."""
        self._kv_cache = kv_cache
        torch.set_num_threads(min(torch.get_num_threads(), numba.get_num_threads()))

    def plan(self, step: AttentionMetadata) -> Attend:
        """Return the `attend` of a step: it stores the step's keys and values, and each token attends up to its own.

        What is the same in all layers is worked out once.

        q, out [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim]
        """
        seqs, context_lens = contexts(step)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._kv_cache.write(layer, step.slot_mapping, k, v)
            grouped = q.unflatten(1, (k.shape[1], -1)).contiguous()  # [num_tokens, num_kv_heads, group, head_dim]
            out = torch.empty_like(grouped)
            run_kernel(out, grouped, self._kv_cache.blocks, step.block_tables, seqs, context_lens, layer=layer)
            return out.flatten(1, 2)

        return attend


AttentionBackend = PagedAttention | KernelAttention


def contexts(step: AttentionMetadata) -> tuple[Tensor, ...]:
    """Return the sequence of each token of a step, and how many tokens it may see, itself included: int64 [num_tokens].

    Sequence 0 computes its tokens 4 and 5, and sequence 1 its token 0:
    >>> nothing = torch.empty(0)
    >>> contexts(AttentionMetadata([0, 2, 3], [6, 1], nothing, nothing, nothing))
    (tensor([0, 0, 1]), tensor([5, 6, 1]))
    """
    parts = enumerate(pairwise(step.query_start_loc))
    rows = [(seq, step.context_lens[seq] - last + i + 1) for seq, (first, last) in parts for i in range(first, last)]
    return torch.tensor(rows, device=step.block_tables.device).T.contiguous().unbind()


def run_kernel(*tensors: Tensor, layer: int) -> None:
    """Run the kernel in Triton on a GPU, and in Numba on a CPU. There, an array shares the memory of each tensor."""
    if tensors[0].is_cuda:
        from .triton_kernel import paged_attention

        return paged_attention(*tensors, layer=layer)
    paged_kernel.paged_attention(*(tensor.numpy() for tensor in tensors), layer)
