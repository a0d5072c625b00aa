"""Softmax in parts: attend to some of the keys at a time, and merge the results.

    out = sum(exp(score) * value) / sum(exp(score))

The `out` of a part and the logarithm of its denominator are enough to merge it: Milakov and Gimelshein 2018
(arXiv:1805.02867), used for attention by Rabe and Staats 2021 (arXiv:2112.05682) and FlashAttention (Dao et al. 2022,
arXiv:2205.14135).
"""

from typing import NamedTuple

import torch
from torch import Tensor

LIMITS = torch.finfo(torch.float32)


class Part(NamedTuple):
    """Attention to some of the keys."""

    out: Tensor  # float32 [..., num_queries, head_dim]
    lse: Tensor  # float32 [..., num_queries], logarithm of the sum of exp(score)


def merge_attn_states(a: Part, b: Part) -> Part:
    """Return attention to the keys of both, and leave `a` and `b` as they are.

    Be exact for an lse of any size. At most one of the two is -inf: that part has no share.

    Two keys of score 0 with the values 1 and 3, and a key of score 0 with the value 8:
    >>> two = Part(torch.tensor([[2.0]]), torch.tensor([2.0]).log())
    >>> one = Part(torch.tensor([[8.0]]), torch.tensor([1.0]).log())
    >>> round(merge_attn_states(two, one).out.item(), 4)
    4.0
    """
    lse = torch.logaddexp(a.lse, b.lse)  # exponentiate only differences: exp(89) is infinite in float32
    share_a, share_b = (a.lse - lse).exp().unsqueeze(-1), (b.lse - lse).exp().unsqueeze(-1)  # they sum to 1
    return Part(a.out * share_a + b.out * share_b, lse)


def attend_part(q: Tensor, k: Tensor, v: Tensor, is_hidden: Tensor) -> Part:
    """Return attention to these keys, in float32. A score is q @ k / sqrt(head_dim).

    `out` is finite for scores of any size. So is `lse`, except for a query that may see none of the keys: its out is
    zeros, and its lse is so low (-inf will do) that merging ignores it.

    q [num_seqs, num_kv_heads, group, query_len, head_dim]: the query heads that share a KV head are a group
    k, v [num_seqs, num_kv_heads, num_keys, head_dim]; is_hidden bool [num_seqs, 1, 1, query_len, num_keys]
    """
    q, k, v = q.float() * q.shape[-1] ** -0.5, k.float().contiguous(), v.float()  # matmul is slow on strided keys
    scores = (q.flatten(2, 3) @ k.mT).unflatten(2, q.shape[2:4])  # [num_seqs, num_kv_heads, group, query_len, num_keys]
    scores = scores.masked_fill_(is_hidden, float("-inf"))
    top = scores.amax(-1, keepdim=True).clamp(min=LIMITS.min)  # [..., query_len, 1], finite: -inf - -inf is NaN
    weights = scores.sub_(top).exp_()  # in [0, 1]
    total = weights.sum(-1, keepdim=True).clamp(min=LIMITS.tiny)  # [..., query_len, 1]
    out = (weights.flatten(2, 3) @ v).unflatten(2, q.shape[2:4]) / total
    return Part(out, (top + total.log()).squeeze(-1))
