"""Partial softmax: attention to parts of the keys, merged, is attention to all of them."""

import pytest
import torch
from torch import Tensor

from ..online_softmax import Part, attend_part, merge_attn_states

NUM_KEYS, HEAD_DIM = 9, 8
VISIBLE = torch.zeros(1, 1, 1, 1, 1, dtype=torch.bool)  # nothing is hidden


def random_qkv(scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [2, 3, 2, 5, HEAD_DIM] and k, v [2, 3, NUM_KEYS, HEAD_DIM]."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 2, 5, HEAD_DIM, generator=generator) * scale
    k, v = (torch.randn(2, 3, NUM_KEYS, HEAD_DIM, generator=generator) for _ in "kv")
    return q, k, v


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, is_hidden: Tensor = VISIBLE) -> Part:
    """Return attention by its definition, in float64."""
    scores = torch.einsum("nkgqd,nksd->nkgqs", q.double(), k.double()) * HEAD_DIM**-0.5
    scores = scores.masked_fill(is_hidden, float("-inf"))
    return Part(torch.einsum("nkgqs,nksd->nkgqd", scores.softmax(-1), v.double()), scores.logsumexp(-1))


def assert_close(name: str, actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Raise AssertionError with the largest difference."""
    if actual.shape != expected.shape:
        raise AssertionError(f"{name} has the shape {[*actual.shape]}, and should have {[*expected.shape]}")
    if not actual.isfinite().all():
        raise AssertionError(f"{name} is not finite: it holds {actual[~actual.isfinite()][0]}")
    if not torch.isclose(actual.double(), expected.double(), tolerance, tolerance).all():
        off = (actual.double() - expected.double()).abs().max()
        raise AssertionError(f"{name} is off by {off:.2g}, from values of about {expected.abs().max():.2g}")


def assert_equal(name: str, part: Part, expected: Part) -> None:
    assert_close(f"the out of {name}", part.out, expected.out)
    assert_close(f"the lse of {name}", part.lse, expected.lse)


# Merging


def test_two_keys_and_a_third():
    """Keys of score 5: two with the values 1 and 3, one with the value 8. The mean of all three is 4."""
    two = Part(torch.tensor([[2.0]]), torch.tensor([2.0]).log() + 5)
    one = Part(torch.tensor([[8.0]]), torch.tensor([1.0]).log() + 5)
    merged = merge_attn_states(two, one)
    assert_close("the out of all three", merged.out, torch.tensor([[4.0]]))
    assert_close("the lse of all three, 5 + log(3),", merged.lse, torch.tensor([3.0]).log() + 5)
    assert (two.out.item(), one.out.item()) == (2.0, 8.0), "merging leaves the two parts as they were"


@pytest.mark.parametrize("cuts", [[1], [4], [4, 5], [2, 4, 6, 8]], ids=str)
@pytest.mark.parametrize("in_order", [True, False])
def test_parts_merge_to_attention_to_all_keys(cuts, in_order):
    q, k, v = random_qkv()
    pieces = list(zip(k.tensor_split(cuts, dim=2), v.tensor_split(cuts, dim=2), strict=True))
    whole, *parts = [attend_plainly(q, *piece) for piece in (pieces if in_order else pieces[::-1])]
    for part in parts:
        whole = merge_attn_states(whole, part)
    assert_equal("all parts together", whole, attend_plainly(q, k, v))


@pytest.mark.parametrize("lse", [1e4, -1e4])
def test_parts_with_scores_of_any_size_merge(lse):
    """exp(89) is infinite in float32, exp(-104) is 0. The first part has exp(1) / (exp(1) + exp(0)) of the weight."""
    parts = [Part(torch.tensor([[out]]), torch.tensor([lse + more])) for out, more in ((1.0, 1.0), (0.0, 0.0))]
    merged = merge_attn_states(*parts)
    assert_close("the out of both", merged.out, torch.tensor([[0.7311]]), 1e-3)
    assert_close("the lse of both", merged.lse, torch.tensor([lse + 1.3133]), 1e-6)


@pytest.mark.parametrize("is_first", [True, False])
def test_part_without_keys_has_no_share(is_first):
    """Its lse is -inf, the logarithm of 0. The other part has the out 2 and the lse 1."""
    parts = [Part(torch.tensor([[out]]), torch.tensor([lse])) for out, lse in ((0.0, float("-inf")), (2.0, 1.0))]
    merged = merge_attn_states(*(parts if is_first else parts[::-1]))
    assert_equal("both, of which one has no keys,", merged, parts[1])


# Attention to a part


def test_part_is_softmax_over_its_keys():
    assert_equal("9 keys that nothing hides", attend_part(*random_qkv(), VISIBLE), attend_plainly(*random_qkv()))


def test_part_is_float32_whatever_its_inputs_are():
    q, k, v = (x.bfloat16() for x in random_qkv())
    part = attend_part(q, k, v, VISIBLE)
    assert (part.out.dtype, part.lse.dtype) == (torch.float32, torch.float32), "the inputs are bfloat16"
    assert_equal("9 keys in bfloat16", part, attend_plainly(q, k, v))


def test_hidden_keys_have_no_weight_whatever_they_are():
    q, k, v = random_qkv()
    is_hidden = torch.zeros(2, 1, 1, 5, NUM_KEYS, dtype=torch.bool)
    is_hidden[0, ..., 6:] = is_hidden[1, 0, 0, 2, 1:] = True
    expected = attend_plainly(q, k, v, is_hidden)
    k[0, :, 6:], v[0, :, 6:] = 1e30, 1e30
    assert_equal("9 keys of which some are hidden", attend_part(q, k, v, is_hidden), expected)


def test_query_that_sees_no_key_gets_no_share():
    q, k, v = random_qkv()
    is_hidden = torch.zeros(2, 1, 1, 5, NUM_KEYS, dtype=torch.bool)
    is_hidden[0, 0, 0, 3] = True
    nothing = attend_part(q, k, v, is_hidden)
    if not nothing.out.isfinite().all():
        raise AssertionError("all keys are hidden from one query, and its out is not finite: -inf less -inf is NaN")
    if nothing.out[0, :, :, 3].any():
        raise AssertionError("all keys are hidden from one query, and its out is not zeros")
    merged = merge_attn_states(attend_part(q, k, v, VISIBLE), nothing).out[0, :, :, 3]
    expected = attend_plainly(q, k, v).out[0, :, :, 3]
    assert_close("merged with a part that it does not see, the out of a query", merged, expected)


@pytest.mark.parametrize("scale", [300.0, -300.0])
def test_scores_of_any_size_give_a_finite_part(scale):
    part, expected = attend_part(*random_qkv(scale), VISIBLE), attend_plainly(*random_qkv(scale))
    assert expected.lse.abs().max() > 500, "exp() of these scores overflows"
    assert_close("with scores in the hundreds, the out", part.out, expected.out, 1e-3)
    assert_close("with scores in the hundreds, the lse", part.lse, expected.lse, 1e-3)
