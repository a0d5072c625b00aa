"""Sampling on the device returns the plain sampler's tokens, with one copy to the host."""

import pytest
import torch

from ...backends.gpu import sampler
from ...backends.gpu.plain import find_likeliest
from ...backends.gpu.sampler import sample_rows
from ...backends.torch import sampler as plain_sampler
from ...backends.torch.sampler import SamplingRow, sample
from ...engine.sampling_params import SamplingParams

PARAMS = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.8},
    {"temperature": 1.3},
    {"top_k": 9, "top_p": 0.5},
]
MIXTURES = {
    "mixed": PARAMS,
    "greedy": PARAMS[:1],
    "top_p": PARAMS[2:3],
    "two methods": PARAMS[3:1:-1],
    "top_k": PARAMS[1::3],
}


def likeliest_of(logits: torch.Tensor) -> torch.Tensor:
    likeliest = torch.empty(len(logits), 3)
    find_likeliest(logits, None, likeliest)
    return likeliest


def make_rows(params: list[dict], num_rows: int) -> list[SamplingRow]:
    return [SamplingRow(SamplingParams(**params[i % len(params)]), i, 0, i) for i in range(num_rows)]


def check(logits: torch.Tensor, rows: list[SamplingRow]) -> None:
    result, expected = sample_rows(logits, likeliest_of(logits), rows), sample(logits, rows)
    assert [token.token_id for token in result] == [token.token_id for token in expected]
    assert [token.logprob for token in result] == pytest.approx([token.logprob for token in expected], abs=1e-5)


@pytest.mark.parametrize("params", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_match_the_plain_sampler(params, dtype):
    logits = (4 * torch.randn(40, 1000, generator=torch.Generator().manual_seed(0))).to(dtype)
    check(logits, make_rows(params, 40))


def test_rows_that_need_more_draws_fall_back_to_the_plain_sampler(monkeypatch):
    logits = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    rows = make_rows([{"top_p": 0.05}, {"temperature": 1.0}], 300)
    fallbacks: list[SamplingRow] = []

    def record(logits, rows):
        fallbacks.extend(rows)
        return sample(logits, rows)

    monkeypatch.setattr(sampler, "sample", record)
    check(logits, rows)
    expected = [row for i, row in enumerate(rows) if count_draws(logits[i : i + 1], row) > 1 + sampler.REDRAWS]
    assert fallbacks == expected and 0 < len(expected) < 150


def count_draws(logits: torch.Tensor, row: SamplingRow) -> int:
    """Return how often the plain sampler draws for this row. logits [1, vocab_size]."""
    attempts: list[int] = []
    draw = plain_sampler.draw

    def record(probs, keys, attempt):
        if len(probs):
            attempts.append(attempt)
        return draw(probs, keys, attempt)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_sampler, "draw", record)
        sample(logits, [row])
    return len(attempts)


def test_the_host_reads_nothing_from_the_device_before_the_copy(monkeypatch):
    """Each of these reads would wait for a GPU."""
    logits = torch.randn(40, 1000, generator=torch.Generator().manual_seed(0))
    likeliest, rows, events = likeliest_of(logits), make_rows(PARAMS, 40), []
    real = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *a, **k: events.append(a[0]) or real(x, *a, **k))
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, recorded(name, getattr(torch.Tensor, name), events))
    sample_rows(logits, likeliest, rows, meanwhile=lambda: events.append("meanwhile"))
    assert events.index("cpu") + 1 == events.index("meanwhile"), events
    assert not set(events[: events.index("meanwhile")]) & {"item", "tolist", "nonzero", "__bool__", "__int__"}, events


def recorded(name, real, events):
    return lambda x, *arguments: events.append(name) or real(x, *arguments)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_row_without_probabilities_is_named_in_the_error(value, params):
    logits = torch.randn(3, 50)
    logits[1] = value
    with pytest.raises(FloatingPointError, match="row 1"):
        sample_rows(logits, likeliest_of(logits), make_rows([params], 3))
