"""Sampling with one copy to the host: the tokens of the plain sampler."""

import pytest
import torch

from ...backends.gpu import sampler
from ...backends.gpu.plain import find_likeliest
from ...backends.gpu.sampler import sample_rows
from ...backends.torch import sampler as torch_sampler
from ...backends.torch.sampler import SamplingRow, sample
from ...engine.sampling_params import SamplingParams

KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.8},
    {"temperature": 1.3},
    {"top_k": 9, "top_p": 0.5},
]
SETS = {"mixed": KINDS, "greedy": KINDS[:1], "top_p": KINDS[2:3], "two kinds": KINDS[3:1:-1], "top_k": KINDS[1::3]}


def likeliest_of(logits: torch.Tensor) -> torch.Tensor:
    """[num_rows, 3]"""
    likeliest = torch.empty(len(logits), 3)
    find_likeliest(logits, None, likeliest)
    return likeliest


def rows_of(kinds: list[dict], count: int) -> list[SamplingRow]:
    return [SamplingRow(SamplingParams(**kinds[i % len(kinds)]), i, 0, i) for i in range(count)]


def check(logits: torch.Tensor, rows: list[SamplingRow]) -> None:
    found, expected = sample_rows(logits, likeliest_of(logits), rows), sample(logits, rows)
    assert [token.token_id for token in found] == [token.token_id for token in expected]
    assert [token.logprob for token in found] == pytest.approx([token.logprob for token in expected], abs=1e-5)


@pytest.mark.parametrize("kinds", SETS.values(), ids=SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_those_of_the_plain_sampler(kinds, dtype):
    logits = (4 * torch.randn(40, 1000, generator=torch.Generator().manual_seed(0))).to(dtype)
    check(logits, rows_of(kinds, 40))


def test_a_row_that_draws_more_often_than_the_device_does_gets_the_same_token(monkeypatch):
    logits = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    rows = rows_of([{"top_p": 0.05}, {"temperature": 1.0}], 300)
    left: list[SamplingRow] = []

    def noted(logits, rows):
        left.extend(rows)
        return sample(logits, rows)

    monkeypatch.setattr(sampler, "sample", noted)
    check(logits, rows)
    often = [row for i, row in enumerate(rows) if attempts_of(logits[i : i + 1], row) > 1 + sampler.REDRAWS]
    assert left == often and 0 < len(often) < 150


def attempts_of(logits: torch.Tensor, row: SamplingRow) -> int:
    """Return how often the plain sampler draws for this row. logits [1, vocab_size]"""
    drawn: list[int] = []
    draw = torch_sampler.draw

    def noted(probs, keys, attempt):
        if len(probs):
            drawn.append(attempt)
        return draw(probs, keys, attempt)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_sampler, "draw", noted)
        sample(logits, [row])
    return len(drawn)


def test_no_number_of_the_device_is_read_before_the_copy(monkeypatch):
    """Each of these would wait for a GPU."""
    logits = torch.randn(40, 1000, generator=torch.Generator().manual_seed(0))
    likeliest, rows, events = likeliest_of(logits), rows_of(KINDS, 40), []
    real = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *a, **k: events.append(a[0]) or real(x, *a, **k))
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, watched(name, getattr(torch.Tensor, name), events))
    sample_rows(logits, likeliest, rows, meanwhile=lambda: events.append("meanwhile"))
    assert events.index("cpu") + 1 == events.index("meanwhile"), events
    assert not set(events[: events.index("meanwhile")]) & {"item", "tolist", "nonzero", "__bool__", "__int__"}, events


def watched(name, real, events):
    return lambda x, *arguments: events.append(name) or real(x, *arguments)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_row_without_probabilities_is_named(value, kind):
    logits = torch.randn(3, 50)
    logits[1] = value
    with pytest.raises(FloatingPointError, match="row 1"):
        sample_rows(logits, likeliest_of(logits), rows_of([kind], 3))
