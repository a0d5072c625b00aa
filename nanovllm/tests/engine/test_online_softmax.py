"""Attention in parts: merged parts equal softmax over all keys, for any parts and any scores."""

import math
import random

import pytest
import torch
from torch import Tensor

from ...backends.torch.online_softmax import Part, attend_part, attend_part_reference, merge_attn_states, merge_first
from .helpers import attend_without_cache
from .pool import HEAD_DIM, HEADS, make_cache, random_qkv, slot
from .reference import attend_block_by_block

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


def test_two_keys_and_a_third():
    """Scores 0, 0 and log 2 have weights 1, 1 and 2: (1 + 3 + 2 x 8) / 4."""
    two = Part(torch.tensor([[2.0]]), torch.tensor([2.0]).log())
    one = Part(torch.tensor([[8.0]]), torch.tensor([2.0]).log())
    out, lse = merge_attn_states(two, one)
    assert out.tolist() == [[pytest.approx(5.0)]] and lse.tolist() == [pytest.approx(math.log(4))]


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_two_parts_merge_into_softmax_over_all_keys(cut):
    scores, values = scored(9)
    assert_same(merge_attn_states(*parts_of(scores, values, [cut])), softmax_over(scores, values))


@pytest.mark.parametrize("cuts", [[3, 6], [1, 2, 3, 4, 5, 6, 7, 8], [8], [2, 3]], ids=str)
def test_any_number_of_parts_merge_into_softmax_over_all_keys(cuts):
    scores, values = scored(9)
    assert_same(merge_all(parts_of(scores, values, cuts)), softmax_over(scores, values))


def test_merging_is_associative():
    scores, values = scored(12)
    a, b, c, d = parts_of(scores, values, [2, 3, 7])
    expected = softmax_over(scores, values)
    for grouping in (
        merge_attn_states(merge_attn_states(merge_attn_states(a, b), c), d),
        merge_attn_states(merge_attn_states(a, b), merge_attn_states(c, d)),
        merge_attn_states(a, merge_attn_states(b, merge_attn_states(c, d))),
    ):
        assert_same(grouping, expected)


def test_merging_is_commutative():
    scores, values = scored(12)
    parts, expected = parts_of(scores, values, [2, 3, 7]), softmax_over(scores, values)
    for seed in range(10):
        assert_same(merge_all(random.Random(seed).sample(parts, 4)), expected)
    a, b = merge_attn_states(parts[0], parts[1]), merge_attn_states(parts[1], parts[0])
    assert torch.equal(a.out, b.out) and torch.equal(a.lse, b.lse)


def test_a_thousand_parts_stay_exact():
    scores, values = scored(1000, spread=3.0)
    whole = merge_all(parts_of(scores, values, list(range(1, 1000))))
    assert_same(whole, softmax_over(scores, values), atol=1e-5, rtol=1e-4)


def test_parts_are_weighted_by_sums_of_exponentials_not_by_numbers_of_keys():
    few, many = torch.full((1, 2), math.log(50.0)), torch.zeros(1, 100)
    parts = [
        softmax_over(scores, torch.full((scores.shape[1], 1), value)) for scores, value in ((few, 1.0), (many, 3.0))
    ]
    assert merge_attn_states(*parts).out.item() == pytest.approx(2.0)


@pytest.mark.parametrize("offset", [1e4, -1e4, 300.0, -300.0])
def test_scores_may_have_any_size(offset):
    """In float32 exp(89) is infinite and exp(-104) is 0, so only differences of scores may be exponentiated.

    At 1e4, float32 has steps of 1e-3, and so do the logarithms of the sums.
    """
    scores, values = scored(9)
    merged = merge_all(parts_of(scores + offset, values, [2, 5]))
    assert_same(merged, softmax_over(scores + offset, values), atol=4e-3, rtol=0)


@pytest.mark.parametrize("order", [1, -1])
def test_a_part_of_negligible_weight_changes_nothing(order):
    """Scores around -1e4 are merged with scores around 1e4."""
    scores, values = scored(9)
    low, high = parts_of(torch.cat((scores[..., :4] - 1e4, scores[..., 4:] + 1e4), dim=-1), values, [4])
    merged = merge_attn_states(*(low, high)[::order])
    assert torch.equal(merged.out, high.out) and torch.equal(merged.lse, high.lse)


def test_queries_may_have_their_keys_in_different_parts():
    """Query 0 attends to the first part, query 1 to the second, query 2 to both."""
    scores = torch.tensor([[1e4, -1e4], [-1e4, 1e4], [7.0, 7.0]], dtype=torch.float64)
    values = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    merged = merge_attn_states(*parts_of(scores, values, [1]))
    assert merged.out.flatten().tolist() == [1.0, 3.0, pytest.approx(2.0)]


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_parts_in_half_precision_are_merged_in_float32(dtype):
    """Each part is rounded once, and merging 16 of them adds no further error."""
    parts = parts_of(*scored(64), list(range(4, 64, 4)), dtype)
    merged = merge_all(parts)
    assert merged.out.dtype == merged.lse.dtype == torch.float32
    weights = torch.stack([part.lse.double() for part in parts]).softmax(0).unsqueeze(-1)  # [16, 2, 3, 5, 1]
    exact = (weights * torch.stack([part.out.double() for part in parts])).sum(0)
    torch.testing.assert_close(merged.out, exact.float())


def test_merging_does_not_change_its_arguments():
    a, b = parts_of(*scored(9), [4])
    before = [x.clone() for x in (*a, *b)]
    merge_attn_states(a, b)
    merge_first(a, Part(*(x[:1] for x in b)))
    assert all(torch.equal(x, y) for x, y in zip((*a, *b), before, strict=True))


# merge_first


@pytest.mark.parametrize("num", [1, 2, 3, 5])
def test_merge_first_changes_only_the_first_rows(num):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 3, 2, 9, generator=generator, dtype=torch.float64)
    values = torch.randn(5, 3, 9, 4, generator=generator, dtype=torch.float64)
    whole, part = parts_of(scores, values, [6])
    merged = merge_first(whole, Part(part.out[:num], part.lse[:num]))
    expected = softmax_over(scores, values)
    assert_same(Part(merged.out[:num], merged.lse[:num]), Part(expected.out[:num], expected.lse[:num]))
    assert torch.equal(merged.out[num:], whole.out[num:]) and torch.equal(merged.lse[num:], whole.lse[num:])
    assert merged.out.shape == whole.out.shape and merged.lse.shape == whole.lse.shape


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_merge_first_converts_the_other_rows_to_float32_exactly(dtype):
    whole, part = parts_of(*scored(9), [6], dtype)
    merged = merge_first(whole, Part(part.out[:1], part.lse[:1]))
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
def test_with_one_key_the_result_is_its_value_and_score(way):
    q, k, v = random_parts(HEAD_DIM, num_keys=1)
    out, lse = way(q, k, v)
    torch.testing.assert_close(out, v.expand_as(q))
    torch.testing.assert_close(lse, (q * k).sum(-1) / math.sqrt(HEAD_DIM))


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


# FlashAttention's loop over blocks


def filled(table: list[int], k: Tensor, v: Tensor, block_size: int, dtype: torch.dtype = torch.float32):
    """Return a pool of 2 layers with these tokens in the blocks of `table`, 1e30 after them and NaN elsewhere."""
    options = {"num_kv_heads": k.shape[1], "head_dim": k.shape[2], "dtype": dtype}
    cache = make_cache(9, table, num_layers=2, block_size=block_size, **options)
    slots = torch.tensor([slot(table, position, block_size) for position in range(len(k))])
    cache.write(1, cache.rows(slots), k.to(dtype), v.to(dtype))
    return cache


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_block_by_block_equals_attention_over_the_whole_context(heads, block_size):
    """Lengths on and off block boundaries, with blocks anywhere in the pool."""
    for context_len in {1, 2, block_size - 1, block_size, block_size + 1, 3 * block_size, 5 * block_size - 1} - {0}:
        table = [7, 2, 5, 0, 3][: -(-context_len // block_size)]
        q, k, v = random_qkv(context_len, *heads)
        cache = filled(table, k, v, block_size)
        out = attend_block_by_block(q[-1], cache, 1, table, context_len)
        torch.testing.assert_close(out, attend_without_cache(0, q, k, v)[-1])


def test_block_by_block_does_not_read_past_the_context():
    """The table of a chunked prompt has all of its blocks from the start."""
    q, k, v = random_qkv(6)
    cache = filled([3, 8, 1, 4], k, v, block_size=4)
    for context_len in (1, 3, 4, 5):
        out = attend_block_by_block(q[context_len - 1], cache, 1, [3, 8, 1, 4], context_len)
        torch.testing.assert_close(out, attend_without_cache(0, q, k, v)[context_len - 1])


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_block_by_block_handles_scores_of_ten_thousand(scale):
    """A far higher score in a later block outweighs all earlier ones, and a far lower one has no effect."""
    q = torch.ones(2, HEAD_DIM)
    k, v = torch.zeros(12, 2, HEAD_DIM), random_qkv(12, 2, 2)[2]
    k[6] = scale / math.sqrt(HEAD_DIM)
    out = attend_block_by_block(q, filled([2, 0, 7], k, v, block_size=4), 1, [2, 0, 7], 12)
    others = [i for i in range(12) if i != 6]
    torch.testing.assert_close(out, v[6] if scale > 0 else v[others].mean(0))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_block_by_block_computes_in_float32_from_a_pool_in_half_precision(dtype):
    q, k, v = random_qkv(11, 6, 2)
    cache = filled([2, 0, 7], k, v, block_size=4, dtype=dtype)
    out = attend_block_by_block(q[-1].to(dtype), cache, 1, [2, 0, 7], 11)
    rounded = [x.to(dtype).float() for x in (q, k, v)]
    torch.testing.assert_close(out, attend_without_cache(0, *rounded)[-1])
