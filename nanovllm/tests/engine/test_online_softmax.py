"""Attention in parts: two merge into what softmax over all keys would have given, whatever the parts and the scores."""

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
    """Scores [2, 3, num_queries 5, num_keys] and values [2, 3, num_keys, head_dim 4], in float64."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, 3, 5, num_keys, generator=generator, dtype=torch.float64) * spread
    return scores, torch.randn(2, 3, num_keys, 4, generator=generator, dtype=torch.float64)


def softmax_over(scores: Tensor, values: Tensor, dtype: torch.dtype = torch.float32) -> Part:
    """What a part must be: by the definition, rounded at the end."""
    return Part((scores.softmax(-1) @ values).to(dtype), scores.logsumexp(-1).float())


def parts_of(scores: Tensor, values: Tensor, cuts: list[int], dtype: torch.dtype = torch.float32) -> list[Part]:
    """The keys cut before each of `cuts`."""
    pieces = zip(scores.tensor_split(cuts, dim=-1), values.tensor_split(cuts, dim=-2), strict=True)
    return [softmax_over(*piece, dtype) for piece in pieces]


def merge_all(parts: list[Part]) -> Part:
    whole, *others = parts
    for part in others:
        whole = merge_attn_states(whole, part)
    return whole


def assert_same(got: Part, expected: Part, **tolerance: float) -> None:
    torch.testing.assert_close(got.out.float(), expected.out.float(), **tolerance)
    torch.testing.assert_close(got.lse, expected.lse)


# merge_attn_states


def test_two_keys_and_a_third():
    """Scores 0, 0 and log 2 weigh 1, 1 and 2: (1 + 3 + 2 x 8) / 4."""
    two = Part(torch.tensor([[2.0]]), torch.tensor([2.0]).log())
    one = Part(torch.tensor([[8.0]]), torch.tensor([2.0]).log())
    out, lse = merge_attn_states(two, one)
    assert out.tolist() == [[pytest.approx(5.0)]] and lse.tolist() == [pytest.approx(math.log(4))]


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_two_parts_make_softmax_over_all_keys(cut):
    scores, values = scored(9)
    assert_same(merge_attn_states(*parts_of(scores, values, [cut])), softmax_over(scores, values))


@pytest.mark.parametrize("cuts", [[3, 6], [1, 2, 3, 4, 5, 6, 7, 8], [8], [2, 3]], ids=str)
def test_any_number_of_parts_make_softmax_over_all_keys(cuts):
    scores, values = scored(9)
    assert_same(merge_all(parts_of(scores, values, cuts)), softmax_over(scores, values))


def test_two_merged_parts_may_be_merged_again_in_any_grouping():
    scores, values = scored(12)
    a, b, c, d = parts_of(scores, values, [2, 3, 7])
    expected = softmax_over(scores, values)
    for grouping in (
        merge_attn_states(merge_attn_states(merge_attn_states(a, b), c), d),
        merge_attn_states(merge_attn_states(a, b), merge_attn_states(c, d)),
        merge_attn_states(a, merge_attn_states(b, merge_attn_states(c, d))),
    ):
        assert_same(grouping, expected)


def test_parts_may_come_in_any_order():
    scores, values = scored(12)
    parts, expected = parts_of(scores, values, [2, 3, 7]), softmax_over(scores, values)
    for seed in range(10):
        assert_same(merge_all(random.Random(seed).sample(parts, 4)), expected)
    a, b = merge_attn_states(parts[0], parts[1]), merge_attn_states(parts[1], parts[0])
    assert torch.equal(a.out, b.out) and torch.equal(a.lse, b.lse)


def test_a_thousand_parts_lose_nothing():
    scores, values = scored(1000, spread=3.0)
    whole = merge_all(parts_of(scores, values, list(range(1, 1000))))
    assert_same(whole, softmax_over(scores, values), atol=1e-5, rtol=1e-4)


def test_parts_weigh_as_the_sums_of_their_exponentials_and_not_as_their_keys_are_many():
    few, many = torch.full((1, 2), math.log(50.0)), torch.zeros(1, 100)
    parts = [
        softmax_over(scores, torch.full((scores.shape[1], 1), value)) for scores, value in ((few, 1.0), (many, 3.0))
    ]
    assert merge_attn_states(*parts).out.item() == pytest.approx(2.0)


@pytest.mark.parametrize("offset", [1e4, -1e4, 300.0, -300.0])
def test_scores_may_be_of_any_size(offset):
    """exp(89) is infinite in float32 and exp(-104) is 0: only differences of scores may reach an exponential.

    At 1e4 float32 has steps of 1e-3, and so have the logarithms of the sums.
    """
    scores, values = scored(9)
    merged = merge_all(parts_of(scores + offset, values, [2, 5]))
    assert_same(merged, softmax_over(scores + offset, values), atol=4e-3, rtol=0)


@pytest.mark.parametrize("order", [1, -1])
def test_a_part_that_weighs_nothing_beside_another_leaves_it_as_it_is(order):
    """Scores around -1e4 beside scores around 1e4."""
    scores, values = scored(9)
    low, high = parts_of(torch.cat((scores[..., :4] - 1e4, scores[..., 4:] + 1e4), dim=-1), values, [4])
    merged = merge_attn_states(*(low, high)[::order])
    assert torch.equal(merged.out, high.out) and torch.equal(merged.lse, high.lse)


def test_queries_may_find_their_keys_in_different_parts():
    """Query 0 in the first, query 1 in the second, query 2 in both."""
    scores = torch.tensor([[1e4, -1e4], [-1e4, 1e4], [7.0, 7.0]], dtype=torch.float64)
    values = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    merged = merge_attn_states(*parts_of(scores, values, [1]))
    assert merged.out.flatten().tolist() == [1.0, 3.0, pytest.approx(2.0)]


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_parts_in_half_precision_are_merged_in_float32(dtype):
    """What each part has lost is lost; merging 16 of them loses nothing more."""
    parts = parts_of(*scored(64), list(range(4, 64, 4)), dtype)
    merged = merge_all(parts)
    assert merged.out.dtype == merged.lse.dtype == torch.float32
    weights = torch.stack([part.lse.double() for part in parts]).softmax(0).unsqueeze(-1)  # [16, 2, 3, 5, 1]
    exact = (weights * torch.stack([part.out.double() for part in parts])).sum(0)
    torch.testing.assert_close(merged.out, exact.float())


def test_merging_leaves_what_is_merged_as_it_was():
    a, b = parts_of(*scored(9), [4])
    before = [x.clone() for x in (*a, *b)]
    merge_attn_states(a, b)
    merge_first(a, Part(*(x[:1] for x in b)))
    assert all(torch.equal(x, y) for x, y in zip((*a, *b), before, strict=True))


# merge_first


@pytest.mark.parametrize("num", [1, 2, 3, 5])
def test_more_keys_for_the_first_of_a_batch_leave_the_others_as_they_are(num):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 3, 2, 9, generator=generator, dtype=torch.float64)
    values = torch.randn(5, 3, 9, 4, generator=generator, dtype=torch.float64)
    whole, part = parts_of(scores, values, [6])
    got = merge_first(whole, Part(part.out[:num], part.lse[:num]))
    expected = softmax_over(scores, values)
    assert_same(Part(got.out[:num], got.lse[:num]), Part(expected.out[:num], expected.lse[:num]))
    assert torch.equal(got.out[num:], whole.out[num:]) and torch.equal(got.lse[num:], whole.lse[num:])
    assert got.out.shape == whole.out.shape and got.lse.shape == whole.lse.shape


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_those_left_as_they_are_are_exact_when_the_others_become_float32(dtype):
    whole, part = parts_of(*scored(9), [6], dtype)
    got = merge_first(whole, Part(part.out[:1], part.lse[:1]))
    assert got.out.dtype == torch.float32
    assert torch.equal(got.out[1], whole.out[1].float()) and torch.equal(got.lse[1], whole.lse[1])


# Attention to a part

WAYS = {"kernel": attend_part, "plain": attend_part_reference}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
each_head_dim = pytest.mark.parametrize("head_dim", [64, 20, 6, 1])


def random_parts(head_dim: int, num_queries: int = 5, num_keys: int = 9, seed: int = 0) -> list[Tensor]:
    """q, k, v [batch 3, heads 4, num_queries or num_keys, head_dim]"""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 4, n, head_dim, generator=generator) for n in (num_queries, num_keys, num_keys)]


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Part:
    """By the definition, from what the tensors hold, in float64 on the CPU."""
    q, k, v = (x.cpu().double() for x in (q, k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + mask.cpu()
    if is_causal:
        scores = scores + torch.full(scores.shape[-2:], float("-inf")).triu(1)
    return softmax_over(scores, v)


def assert_exact(got: Part, expected: Part, dtype: torch.dtype) -> None:
    """Scores are float32 whatever the tensors are. In half precision weights may be rounded, and so is the result.

    And on some CPUs the exponential of the half precision kernel is a quicker one, right to 2e-5: far below rounding.
    """
    eps = 2e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    assert got.lse.dtype == torch.float32 and got.out.dtype == dtype
    torch.testing.assert_close(got.out.float().cpu(), expected.out, atol=eps, rtol=eps)
    lse_eps = 2e-6 if dtype == torch.float32 else 1e-4
    torch.testing.assert_close(got.lse.cpu(), expected.lse, atol=lse_eps, rtol=lse_eps)


def assert_attends(way, dtype: torch.dtype, head_dim: int, device: str = "cpu") -> None:
    """Plain, causal, masked, and with keys that heads share."""
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
def test_keys_of_flat_tokens_are_taken_as_views(way, dtype):
    """As _attend_chunk hands them over: [num_tokens, heads, head_dim], turned and expanded, nothing copied."""
    q, k, v = (x.to(dtype) for x in random_qkv(7, num_heads=6, num_kv_heads=2))
    grouped = q.unflatten(1, (2, 3)).permute(2, 1, 0, 3)  # [group 3, num_kv_heads 2, 7, head_dim]
    k, v = (x.transpose(0, 1).expand(3, -1, -1, -1) for x in (k, v))
    assert_exact(way(grouped, k, v, is_causal=True), exact(grouped, k, v, is_causal=True), dtype)


def test_no_keys_at_all_are_refused():
    """The kernel would divide by zero, and that ends the process."""
    q, k, v = random_parts(HEAD_DIM)
    with pytest.raises(AssertionError, match="at least one key"):
        attend_part(q, k[:, :, :0], v[:, :, :0])


@each_way
def test_of_one_key_the_result_is_its_value_and_its_score(way):
    q, k, v = random_parts(HEAD_DIM, num_keys=1)
    out, lse = way(q, k, v)
    torch.testing.assert_close(out, v.expand_as(q))
    torch.testing.assert_close(lse, (q * k).sum(-1) / math.sqrt(HEAD_DIM))


@each_way
def test_what_lies_under_the_mask_counts_nothing(way):
    """Were it 1e30."""
    q, k, v = random_parts(HEAD_DIM)
    mask = torch.zeros(3, 1, 1, 9)
    mask[1, ..., 4:] = float("-inf")
    k[1, :, 4:], v[1, :, 4:] = 1e30, 1e30
    expected = exact(q[1:2], k[1:2, :, :4], v[1:2, :, :4])
    got = way(q, k, v, mask)
    assert_exact(Part(got.out[1:2], got.lse[1:2]), expected, torch.float32)


@each_way
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cuts", [[1], [4, 5], [2, 4, 6, 8]], ids=str)
def test_parts_of_the_keys_merge_into_attention_to_all(way, dtype, cuts):
    q, k, v = (x.to(dtype) for x in random_parts(20))
    pieces = zip(k.tensor_split(cuts, dim=2), v.tensor_split(cuts, dim=2), strict=True)
    merged = merge_all([way(q, *piece) for piece in pieces])
    assert merged.out.dtype == torch.float32
    assert_exact(Part(merged.out.to(dtype), merged.lse), exact(q, k, v), dtype)


@each_way
def test_scores_of_ten_thousand_do_not_overflow(way):
    q, k, v = random_parts(64)
    k[..., 0], q[..., 0] = 283.0, 283.0  # 283 * 283 / 8: all scores are about 10,000
    for sign in (1, -1):
        got = way(q * sign, k, v)
        assert got.lse.isfinite().all() and (got.lse * sign > 9000).all()
        torch.testing.assert_close(got.out, exact(q * sign, k, v).out, atol=2e-2, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each_head_dim
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_part_is_softmax_over_its_keys_on_a_gpu(dtype, head_dim):
    assert_attends(attend_part, dtype, head_dim, device="cuda")


# The paper's loop over blocks


def filled(table: list[int], k: Tensor, v: Tensor, block_size: int, dtype: torch.dtype = torch.float32):
    """A pool in which these tokens are where the table says, 1e30 behind them and NaN elsewhere; 2 layers."""
    kinds = {"num_kv_heads": k.shape[1], "head_dim": k.shape[2], "dtype": dtype}
    cache = make_cache(9, table, num_layers=2, block_size=block_size, **kinds)
    slots = torch.tensor([slot(table, position, block_size) for position in range(len(k))])
    cache.write(1, cache.rows(slots), k.to(dtype), v.to(dtype))
    return cache


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_block_by_block_is_attention_over_the_whole_row(heads, block_size):
    """Claim 9: for any length, on a block boundary or not, wherever the blocks lie."""
    for context_len in {1, 2, block_size - 1, block_size, block_size + 1, 3 * block_size, 5 * block_size - 1} - {0}:
        table = [7, 2, 5, 0, 3][: -(-context_len // block_size)]
        q, k, v = random_qkv(context_len, *heads)
        cache = filled(table, k, v, block_size)
        out = attend_block_by_block(q[-1], cache, 1, table, context_len)
        torch.testing.assert_close(out, attend_without_cache(0, q, k, v)[-1])


def test_block_by_block_reads_no_block_behind_the_context():
    """Of a prompt that comes in chunks the table has all its blocks from the start."""
    q, k, v = random_qkv(6)
    cache = filled([3, 8, 1, 4], k, v, block_size=4)
    for context_len in (1, 3, 4, 5):
        out = attend_block_by_block(q[context_len - 1], cache, 1, [3, 8, 1, 4], context_len)
        torch.testing.assert_close(out, attend_without_cache(0, q, k, v)[context_len - 1])


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_block_by_block_stands_scores_of_ten_thousand(scale):
    """A later block with a far higher score makes all before it count nothing; a far lower one counts nothing."""
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
