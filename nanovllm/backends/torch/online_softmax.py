"""Online softmax: attend to one part of the keys at a time, then merge the parts.

    out = sum(exp(score) * value) / sum(exp(score))

Each part is represented by its `out` and the logarithm of its denominator (Milakov and Gimelshein 2018,
arXiv:1805.02867). Rabe and Staats 2021 (arXiv:2112.05682) and FlashAttention (Dao et al. 2022, arXiv:2205.14135) apply
this to attention.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Part(NamedTuple):
    """Attention to some of the keys."""

    out: Tensor  # [..., num_queries, head_dim], float32 once merged
    lse: Tensor  # float32 [..., num_queries], logarithm of the sum of exp(score)


def merge_attn_states(a: Part, b: Part) -> Part:
    """Return attention to the keys of both parts.

    Only differences between lse values are exponentiated, because exp() of a large lse overflows. In the example, all
    scores are 0. Part `two` has two keys, with the values 1 and 3, and part `one` has one key, with the value 8.

    >>> two = Part(torch.tensor([[2.0]]), torch.tensor([2.0]).log())
    >>> one = Part(torch.tensor([[8.0]]), torch.tensor([1.0]).log())
    >>> round(merge_attn_states(two, one).out.item(), 4)
    4.0
    """
    lse = torch.logaddexp(a.lse, b.lse)
    share_a, share_b = (a.lse - lse).exp().unsqueeze(-1), (b.lse - lse).exp().unsqueeze(-1)  # they sum to 1
    return Part(a.out * share_a + b.out * share_b, lse)


def merge_into_first_rows(whole: Part, part: Part) -> Part:
    """Return `whole` merged with `part`, which adds keys for only the first len(part.lse) rows of the batch."""
    num_rows = len(part.lse)
    merged = merge_attn_states(Part(whole.out[:num_rows], whole.lse[:num_rows]), part)
    return Part(torch.cat((merged.out, whole.out[num_rows:])), torch.cat((merged.lse, whole.lse[num_rows:])))


def attend_part(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Part:
    """Return attention to these keys. Each query must see at least one of them.

    `mask` is added to the scores. With `is_causal`, query i sees keys 0 .. i.
    q [batch, heads, num_queries, head_dim]; k, v [batch, heads, num_keys, head_dim]
    """
    assert k.shape[-2] > 0, "each query must see at least one key"
    if q.device.type == "cpu":  # F.scaled_dot_product_attention calls this, but returns no lse
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=mask)
        return Part(out, lse)
    return attend_part_reference(q, k, v, mask, is_causal)


def attend_part_reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Part:
    """Return attention as attend_part() does, with PyTorch's public operations, on any device.

    All scores are in memory at the same time: float32 [batch, heads, num_queries, num_keys].
    """
    scores = q.float() @ k.float().transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + mask
    if is_causal:
        later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    lse = scores.logsumexp(-1)  # [batch, heads, num_queries]
    weights = (scores - lse.unsqueeze(-1)).exp().to(v.dtype)
    return Part(weights @ v, lse)
