"""SamplingParams, and the sampler: logits in, one token a row out."""

import math
import operator

import pytest
import torch
from torch import Tensor

from ...backends.torch import sampler
from ...backends.torch.sampler import SampledToken, SamplingRow, sample
from ...engine.sampling_params import SamplingParams
from ...llm import LLM

PROBS = [0.4, 0.3, 0.15, 0.1, 0.05]
LOGITS = torch.tensor(PROBS).log() + 3  # a shift that softmax does not see
NUM_DRAWS = 4000


def row(seed: int = 0, position: int = 0, sample_index: int = 0, **params) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed, sample_index, position)


def draw(logits: Tensor, **params) -> list[int]:
    """NUM_DRAWS tokens from the same logits, each with the noise of another position."""
    rows = [row(seed=5, position=i, **params) for i in range(NUM_DRAWS)]
    return [token.token_id for token in sample(logits.expand(NUM_DRAWS, -1), rows)]


def assert_drawn_from(tokens: list[int], probs: list[float]) -> None:
    """Chi-square below what 1 in 10,000 fair draws exceeds (with 4 degrees of freedom, 23.5); nothing impossible."""
    counts = [tokens.count(i) for i in range(len(probs))]
    assert all(n == 0 for n, p in zip(counts, probs, strict=True) if p == 0), counts
    expected = [p * len(tokens) for p in probs]
    chi_square = sum((n - e) ** 2 / e for n, e in zip(counts, expected, strict=True) if e)
    assert chi_square < 23.5, (counts, expected)


# Greedy


def test_temperature_0_takes_the_likeliest():
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 3.0, 2.0]])
    assert [token.token_id for token in sample(logits, [row(temperature=0.0, seed=s) for s in (1, 2)])] == [1, 0]


def test_of_equals_greedy_takes_the_first():
    assert sample(torch.tensor([[1.0, 2.0, 2.0]]), [row(temperature=0.0)])[0].token_id == 1


def test_top_k_and_top_p_change_nothing_at_temperature_0():
    assert sample(LOGITS.unsqueeze(0), [row(temperature=0.0, top_k=3, top_p=0.1)])[0].token_id == 0


# The distribution


def test_tokens_are_drawn_from_the_softmax():
    assert_drawn_from(draw(LOGITS), PROBS)


def test_draws_of_other_seeds_and_samples_follow_it_too():
    logits = LOGITS.expand(NUM_DRAWS, -1)
    by_seed = sample(logits, [row(seed=i) for i in range(NUM_DRAWS)])
    by_sample = sample(logits, [row(sample_index=i) for i in range(NUM_DRAWS)])
    for tokens in (by_seed, by_sample):
        assert_drawn_from([token.token_id for token in tokens], PROBS)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_sharpens_below_1_and_flattens_above(temperature):
    powers = [p ** (1 / temperature) for p in PROBS]
    assert_drawn_from(draw(LOGITS, temperature=temperature), [p / sum(powers) for p in powers])


def test_top_k_draws_from_the_k_likeliest():
    assert_drawn_from(draw(LOGITS, top_k=2), [4 / 7, 3 / 7, 0, 0, 0])


@pytest.mark.parametrize("top_p, kept", [(0.001, 1), (0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.94, 4), (0.96, 5)])
def test_top_p_draws_from_the_fewest_that_sum_to_p(top_p, kept):
    assert_drawn_from(draw(LOGITS, top_p=top_p), [p / sum(PROBS[:kept]) for p in PROBS[:kept]] + [0.0] * (5 - kept))


def test_top_p_counts_within_what_top_k_left():
    """Of 0.4, 0.3, 0.15 the first two are 0.82: with top_p 0.8 they suffice, of all five they would be 0.7 and not."""
    assert_drawn_from(draw(LOGITS, top_k=3, top_p=0.8), [4 / 7, 3 / 7, 0, 0, 0])
    assert_drawn_from(draw(LOGITS, top_p=0.8), [p / 0.85 for p in PROBS[:3]] + [0, 0])


def test_top_p_is_of_what_temperature_left():
    """At temperature 0.5 the likeliest has 0.16 of 0.285, more than 0.5."""
    assert set(draw(LOGITS, temperature=0.5, top_p=0.5)) == {0}
    assert set(draw(LOGITS, temperature=1.0, top_p=0.5)) == {0, 1}


def test_top_k_of_more_than_there_are_is_all():
    assert draw(LOGITS, top_k=10**30) == draw(LOGITS, top_k=5) == draw(LOGITS)


def test_of_equals_at_the_edge_the_first_are_kept():
    assert set(draw(torch.tensor([1.0, 2.0, 1.0, 1.0]), top_k=3)) == {0, 1, 2}
    assert set(draw(torch.zeros(4), top_p=0.5)) == {0, 1}
    assert set(draw(torch.zeros(4), top_k=3, top_p=0.5)) == {0, 1}


def test_a_row_without_limits_keeps_every_token_whatever_its_neighbour_wants():
    """Of the second token 5 in 100,000 are drawn: top_p 0.99999 would leave it out."""
    logits = torch.tensor([[10.0, 0.0]]).expand(2 * NUM_DRAWS, -1)
    rows = [row(position=i, top_p=0.5 if i % 2 else 1.0, temperature=2.0) for i in range(2 * NUM_DRAWS)]
    tokens = [token.token_id for token in sample(logits, rows)]
    assert sum(tokens[1::2]) == 0 < sum(tokens[::2])


@pytest.mark.parametrize("params", [{"temperature": 1e-300}, {"top_k": 1}, {"top_p": 1e-300}], ids=str)
def test_extremes_come_down_to_the_likeliest(params):
    """1e-300 is 0 in float32."""
    assert set(draw(LOGITS.flip(0), **params)) == {4}


def test_a_huge_temperature_makes_all_tokens_alike():
    assert_drawn_from(draw(LOGITS, temperature=1e300), [0.2] * 5)


def test_logits_of_half_precision_are_drawn_from_as_well():
    logits = torch.tensor(PROBS).log().half()
    assert_drawn_from(draw(logits), PROBS)
    token = sample(logits.unsqueeze(0), [row(temperature=0.0)])[0]
    assert token == SampledToken(0, pytest.approx(float(logits.float().log_softmax(dim=-1)[0]), abs=1e-6))


# Seeds


def test_no_generator_moves_the_draws_and_they_move_none():
    before = draw(LOGITS)
    torch.manual_seed(0)
    first = torch.rand(3)
    torch.manual_seed(0)
    assert draw(LOGITS) == before
    assert torch.equal(torch.rand(3), first)


@pytest.mark.parametrize("at_once", [250, 1 << 20])  # in parts of two rows, or all together
def test_a_row_draws_the_same_alone_and_in_any_company(at_once, monkeypatch):
    monkeypatch.setattr(sampler, "MAX_IN_CACHE", at_once)
    kinds = [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 1.7, "top_k": 40, "top_p": 0.9}]
    rows = [row(seed=i, position=i, **kinds[i % len(kinds)]) for i in range(20)]
    logits = torch.randn(20, 100, generator=torch.Generator().manual_seed(0))
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(20)]
    backwards = sample(logits.flip(0), rows[::-1])[::-1]
    assert [token.token_id for token in together] == [token.token_id for token in alone]
    assert [token.token_id for token in together] == [token.token_id for token in backwards]


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 300}, {"top_k": 300, "top_p": 0.9}], ids=str)
def test_a_small_error_in_the_logits_moves_almost_no_draw(params):
    """What batching does to float32 logits, 1e-5: the cumulative distribution, inverted, moves many draws."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 1000, generator=generator)
    shaken = logits + 1e-5 * torch.randn(500, 1000, generator=generator)
    rows = [row(position=i, **params) for i in range(500)]
    assert sum(a.token_id != b.token_id for a, b in zip(sample(logits, rows), sample(shaken, rows), strict=True)) <= 1


def test_inverting_the_cumulative_distribution_would_move_more():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1000, generator=generator)
    shaken = logits + 1e-5 * torch.randn(1000, generator=generator)
    rows = [row(position=i) for i in range(30_000)]
    raced = [[token.token_id for token in sample(each.expand(30_000, -1), rows)] for each in (logits, shaken)]
    uniform = torch.rand(30_000, generator=generator)
    inverted = [torch.searchsorted(each.softmax(dim=-1).cumsum(dim=-1), uniform).tolist() for each in (logits, shaken)]
    moved_by_race, moved_by_inversion = (sum(map(operator.ne, *tokens)) for tokens in (raced, inverted))
    assert moved_by_race <= 1 and moved_by_inversion >= 4


def generated(llm: LLM, prompts: list, params: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def test_a_seed_gives_the_same_text_alone_in_a_batch_and_on_another_engine(checkpoint):
    def seeded(seed: int) -> SamplingParams:
        return SamplingParams(seed=seed, max_tokens=20, ignore_eos=True, top_k=50)

    alone = generated(LLM(checkpoint), [[1, 5]], [seeded(0)])[0]  # 0 is a seed like any other
    llm = LLM(checkpoint, seed=99, kv_cache_tokens=256)
    for others in ([seeded(8), seeded(9)], [SamplingParams(max_tokens=30), SamplingParams(temperature=0.0)]):
        for place in range(3):
            prompts, params = [[1], [1, 2, 3]], list(others)
            prompts.insert(place, [1, 5])
            params.insert(place, seeded(0))
            assert generated(llm, prompts, params)[place] == alone
    assert generated(llm, [[1, 5]], [seeded(8)])[0] != alone


def test_requests_without_a_seed_differ_and_come_again_with_the_engine_s(checkpoint):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    texts = generated(LLM(checkpoint, seed=1), [[1, 5]] * 3, [params] * 3)
    assert len({tuple(text) for text in texts}) == 3
    assert generated(LLM(checkpoint, seed=1), [[1, 5]] * 3, [params] * 3) == texts
    assert generated(LLM(checkpoint, seed=2), [[1, 5]] * 3, [params] * 3) != texts


def test_the_same_engine_asked_again_says_something_else(checkpoint):
    llm, params = LLM(checkpoint), SamplingParams(max_tokens=20, ignore_eos=True)
    assert generated(llm, [[1, 5]], [params]) != generated(llm, [[1, 5]], [params])


def test_every_token_of_a_text_is_drawn_anew(checkpoint):
    """With all tokens alike the noise alone decides: 60 draws of 320 are about 54 different tokens."""
    params = SamplingParams(temperature=1e300, seed=3, max_tokens=60, ignore_eos=True)
    assert len(set(generated(LLM(checkpoint), [[1]], [params])[0])) > 40


# Log-probabilities


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.3, "top_k": 2}, {"top_p": 0.5}], ids=str)
def test_a_logprob_is_of_the_raw_logits(params):
    for position in range(20):
        token = sample(LOGITS.unsqueeze(0), [row(position=position, **params)])[0]
        assert token == SampledToken(token.token_id, pytest.approx(math.log(PROBS[token.token_id]), abs=1e-6))


def test_no_rows_give_no_tokens():
    assert sample(torch.empty(0, 5), []) == []


# Logits that are no numbers


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 2, "top_p": 0.5}], ids=str)
@pytest.mark.parametrize(
    "poisoned",
    [[math.nan] * 5, [0.0, math.nan, 0.0, 1.0, 2.0], [0.0, math.inf, 0.0, 1.0, 2.0], [-math.inf] * 5],
    ids=str,
)
def test_a_row_that_has_no_probabilities_is_an_error_that_names_it(poisoned, params):
    logits = torch.stack([LOGITS, torch.tensor(poisoned), LOGITS])
    with pytest.raises(FloatingPointError, match="the logits of row 1 are NaN, infinite or all -inf"):
        sample(logits, [row(**params)] * 3)
    assert len(sample(logits[::2], [row(**params)] * 2)) == 2


def test_rows_are_counted_through_all_parts(monkeypatch):
    monkeypatch.setattr(sampler, "MAX_IN_CACHE", 10)  # two rows of five
    logits = torch.stack([LOGITS, LOGITS, LOGITS, torch.full((5,), math.nan)])
    with pytest.raises(FloatingPointError, match="the logits of row 3 are NaN"):
        sample(logits, [row()] * 4)


def test_minus_infinity_forbids_a_token_and_is_no_fault():
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    assert_drawn_from(draw(logits), [0, 0.5, 0, 0.5, 0])
    logits = torch.tensor([[-math.inf, 3.4e38, -3.4e38]])  # neither are the largest numbers that there are
    assert sample(logits, [row(temperature=0.0)]) == [SampledToken(1, 0.0)]
