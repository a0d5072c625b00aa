"""Attention in parts: merged parts equal softmax over all keys, for any parts and any scores."""

import math

import pytest
import torch
from torch import Tensor

from ...backends.torch.online_softmax import (
    Part,
    attend_part,
    attend_part_reference,
    merge_attn_states,
    merge_into_first_rows,
)
from ..testing.pools import HEAD_DIM, random_qkv

HALF = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALF]


def scored(num_keys: int, seed: int = 0, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return float64 scores [2, 3, num_queries 5, num_keys] and values [2, 3, num_keys, head_dim 4]."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, 3, 5, num_keys, generator=generator, dtype=torch.float64) * spread
    return scores, torch.randn(2, 3, num_keys, 4, generator=generator, dtype=torch.float64)


def softmax_over(scores: Tensor, values: Tensor, dtype: torch.dtype = torch.float32) -> Part:
    """Return the expected part: by definition, in float64, rounded at the end."""
    return Part((scores.softmax(-1) @ values).to(dtype), scores.logsumexp(-1).float())


def parts_of(scores: Tensor, values: Tensor, cuts: list[int], dtype: torch.dtype = torch.float32) -> list[Part]:
    """Return parts of the keys, which are cut before each of `cuts`."""
    chunks = zip(scores.tensor_split(cuts, dim=-1), values.tensor_split(cuts, dim=-2), strict=True)
    return [softmax_over(*chunk, dtype) for chunk in chunks]


def merge_all(parts: list[Part]) -> Part:
    whole, *others = parts
    for part in others:
        whole = merge_attn_states(whole, part)
    return whole


def assert_same(part: Part, expected: Part, **tolerance: float) -> None:
    torch.testing.assert_close(part.out.float(), expected.out.float(), **tolerance)
    torch.testing.assert_close(part.lse, expected.lse)


# merge_attn_states


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_two_parts_merge_into_softmax_over_all_keys(cut):
    scores, values = scored(9)
    assert_same(merge_attn_states(*parts_of(scores, values, [cut])), softmax_over(scores, values))


@pytest.mark.parametrize("offset", [1e4, -1e4, 300.0, -300.0])
def test_scores_may_have_any_size(offset):
    """In float32 exp(89) is infinite and exp(-104) is 0, so only differences of scores may be exponentiated.

    At 1e4, float32 has steps of 1e-3, and so do the logarithms of the sums.
    """
    scores, values = scored(9)
    merged = merge_all(parts_of(scores + offset, values, [2, 5]))
    assert_same(merged, softmax_over(scores + offset, values), atol=4e-3, rtol=0)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_parts_in_half_precision_are_merged_in_float32(dtype):
    """Each part is rounded once, and merging 16 of them adds no further error."""
    parts = parts_of(*scored(64), list(range(4, 64, 4)), dtype)
    merged = merge_all(parts)
    assert merged.out.dtype == merged.lse.dtype == torch.float32
    weights = torch.stack([part.lse.double() for part in parts]).softmax(0).unsqueeze(-1)  # [16, 2, 3, 5, 1]
    exact = (weights * torch.stack([part.out.double() for part in parts])).sum(0)
    torch.testing.assert_close(merged.out, exact.float())


# merge_into_first_rows


@pytest.mark.parametrize("num", [1, 2, 3, 5])
def test_merge_first_changes_only_the_first_rows(num):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 3, 2, 9, generator=generator, dtype=torch.float64)
    values = torch.randn(5, 3, 9, 4, generator=generator, dtype=torch.float64)
    whole, part = parts_of(scores, values, [6])
    merged = merge_into_first_rows(whole, Part(part.out[:num], part.lse[:num]))
    expected = softmax_over(scores, values)
    assert_same(Part(merged.out[:num], merged.lse[:num]), Part(expected.out[:num], expected.lse[:num]))
    assert torch.equal(merged.out[num:], whole.out[num:]) and torch.equal(merged.lse[num:], whole.lse[num:])
    assert merged.out.shape == whole.out.shape and merged.lse.shape == whole.lse.shape


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_merge_first_converts_the_other_rows_to_float32_exactly(dtype):
    whole, part = parts_of(*scored(9), [6], dtype)
    merged = merge_into_first_rows(whole, Part(part.out[:1], part.lse[:1]))
    assert merged.out.dtype == torch.float32
    assert torch.equal(merged.out[1], whole.out[1].float()) and torch.equal(merged.lse[1], whole.lse[1])


# Attention to a part

WAYS = {"kernel": attend_part, "plain": attend_part_reference}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
each_head_dim = pytest.mark.parametrize("head_dim", [64, 20, 6, 1])


def random_parts(head_dim: int, num_queries: int = 5, num_keys: int = 9, seed: int = 0) -> list[Tensor]:
    """Return q, k and v [batch 3, heads 4, num_queries or num_keys, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 4, n, head_dim, generator=generator) for n in (num_queries, num_keys, num_keys)]


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Part:
    """Return attention by definition, computed in float64 on the CPU."""
    q, k, v = (x.cpu().double() for x in (q, k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + mask.cpu()
    if is_causal:
        scores = scores + torch.full(scores.shape[-2:], float("-inf")).triu(1)
    return softmax_over(scores, v)


def assert_exact(part: Part, expected: Part, dtype: torch.dtype) -> None:
    """Assert that scores are float32, and that only weights and the result are rounded to half precision.

    On some CPUs the half-precision kernel also has a faster exponential, exact to 2e-5, which is far below rounding.
    """
    eps = 2e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    assert part.lse.dtype == torch.float32 and part.out.dtype == dtype
    torch.testing.assert_close(part.out.float().cpu(), expected.out, atol=eps, rtol=eps)
    lse_eps = 2e-6 if dtype == torch.float32 else 1e-4
    torch.testing.assert_close(part.lse.cpu(), expected.lse, atol=lse_eps, rtol=lse_eps)


def assert_attends(way, dtype: torch.dtype, head_dim: int, device: str = "cpu") -> None:
    """Check attention without a mask, causal, masked, and with shared KV heads."""
    q, k, v = (x.to(device, dtype) for x in random_parts(head_dim))
    assert_exact(way(q, k, v), exact(q, k, v), dtype)

    k5, v5 = k[:, :, :5], v[:, :, :5]
    assert_exact(way(q, k5, v5, is_causal=True), exact(q, k5, v5, is_causal=True), dtype)

    mask = torch.zeros(3, 1, 1, 9, dtype=dtype, device=device)
    mask[0, ..., 1:] = mask[1, ..., 6:] = float("-inf")
    assert_exact(way(q, k, v, mask), exact(q, k, v, mask), dtype)

    grouped = q[0].unflatten(0, (2, 2))  # two heads for each of two KV heads, [group, num_kv_heads, 5, head_dim]
    k2, v2 = (x[0, :2].expand(2, -1, -1, -1) for x in (k, v))
    assert_exact(way(grouped, k2, v2), exact(grouped, k2, v2), dtype)


@each_way
@each_head_dim
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_part_is_softmax_over_its_keys(way, dtype, head_dim):
    assert_attends(way, dtype, head_dim)


@each_way
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_may_be_transposed_and_expanded_views(way, dtype):
    """PagedAttend passes its chunks like this."""
    q, k, v = (x.to(dtype) for x in random_qkv(7, num_heads=6, num_kv_heads=2))
    grouped = q.unflatten(1, (2, 3)).permute(2, 1, 0, 3)  # [group 3, num_kv_heads 2, 7, head_dim]
    k, v = (x.transpose(0, 1).expand(3, -1, -1, -1) for x in (k, v))
    assert_exact(way(grouped, k, v, is_causal=True), exact(grouped, k, v, is_causal=True), dtype)


def test_attending_to_no_keys_is_rejected():
    """The kernel would divide by zero, which crashes the process."""
    q, k, v = random_parts(HEAD_DIM)
    with pytest.raises(AssertionError, match="at least one key"):
        attend_part(q, k[:, :, :0], v[:, :, :0])


@each_way
def test_masked_keys_have_no_effect(way):
    """Even keys and values of 1e30 have none."""
    q, k, v = random_parts(HEAD_DIM)
    mask = torch.zeros(3, 1, 1, 9)
    mask[1, ..., 4:] = float("-inf")
    k[1, :, 4:], v[1, :, 4:] = 1e30, 1e30
    expected = exact(q[1:2], k[1:2, :, :4], v[1:2, :, :4])
    out, lse = way(q, k, v, mask)
    assert_exact(Part(out[1:2], lse[1:2]), expected, torch.float32)


@each_way
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cuts", [[1], [4, 5], [2, 4, 6, 8]], ids=str)
def test_parts_of_the_keys_merge_into_attention_to_all(way, dtype, cuts):
    q, k, v = (x.to(dtype) for x in random_parts(20))
    chunks = zip(k.tensor_split(cuts, dim=2), v.tensor_split(cuts, dim=2), strict=True)
    merged = merge_all([way(q, *chunk) for chunk in chunks])
    assert merged.out.dtype == torch.float32
    assert_exact(Part(merged.out.to(dtype), merged.lse), exact(q, k, v), dtype)


@each_way
def test_scores_of_ten_thousand_do_not_overflow(way):
    q, k, v = random_parts(64)
    k[..., 0], q[..., 0] = 283.0, 283.0  # 283 * 283 / 8: all scores are about 10,000
    for sign in (1, -1):
        out, lse = way(q * sign, k, v)
        assert lse.isfinite().all() and (lse * sign > 9000).all()
        torch.testing.assert_close(out, exact(q * sign, k, v).out, atol=2e-2, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each_head_dim
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_part_is_softmax_over_its_keys_on_a_gpu(dtype, head_dim):
    assert_attends(attend_part, dtype, head_dim, device="cuda")
