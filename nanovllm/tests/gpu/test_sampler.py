"""Sampling with one copy to the host: the tokens of core's sampler."""

import pytest
import torch

from ...core.sampling import SamplingParams, SamplingRow, sample
from ...kernels.gpu.sampler import sample_rows

KINDS = [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.8}, {"temperature": 1.3}]


@pytest.mark.parametrize("kinds", [KINDS, KINDS[:1], KINDS[2:3]], ids=["mixed", "greedy", "one kind"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_those_of_cores_sampler(kinds, dtype):
    logits = (4 * torch.randn(40, 1000, generator=torch.Generator().manual_seed(0))).to(dtype)
    rows = [SamplingRow(SamplingParams(**kinds[i % len(kinds)]), i, 0, i) for i in range(40)]
    found, expected = sample_rows(logits, rows), sample(logits, rows)
    assert [token for token, _ in found] == [token for token, _ in expected]
    assert [logprob for _, logprob in found] == pytest.approx([logprob for _, logprob in expected], abs=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_without_probabilities_is_named(value):
    logits = torch.randn(3, 50)
    logits[1] = value
    with pytest.raises(FloatingPointError, match="row 1"):
        sample_rows(logits, [SamplingRow(SamplingParams(temperature=0), i, 0, 0) for i in range(3)])


def test_no_rows():
    assert sample_rows(torch.empty(0, 50), []) == []
