"""SamplingParams, and the sampler: from logits to one token for each row."""

import math

import pytest
import torch
from torch import Tensor

from ..llm import LLM
from ..sampling import SampledToken, SamplingParams, SamplingRow, sample

PROBS = [0.4, 0.3, 0.15, 0.1, 0.05]
LOGITS = torch.tensor(PROBS).log() + 3  # softmax ignores the shift
NUM_DRAWS = 1000


def row(seed: int = 0, position: int = 0, sample_index: int = 0, **params) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed, sample_index, position)


def draw(logits: Tensor, **params) -> list[int]:
    """Return NUM_DRAWS tokens from the same logits, each with the noise of another position."""
    rows = [row(seed=5, position=i, **params) for i in range(NUM_DRAWS)]
    return [token.token_id for token in sample(logits.expand(NUM_DRAWS, -1), rows)]


def assert_distributed(tokens: list[int], probs: list[float]) -> None:
    """Raise AssertionError if 1 in 10,000 fair draws would be further off: chi-square, 4 degrees of freedom."""
    counts = [tokens.count(i) for i in range(len(probs))]
    assert all(n == 0 for n, p in zip(counts, probs, strict=True) if p == 0), counts
    expected = [p * len(tokens) for p in probs]
    chi_square = sum((n - e) ** 2 / e for n, e in zip(counts, expected, strict=True) if e)
    assert chi_square < 23.5, (counts, expected)


# The distribution


def test_temperature_0_takes_the_first_of_the_most_likely():
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 3.0, 2.0]])
    params = {"temperature": 0.0, "top_k": 2, "top_p": 0.1}
    assert [token.token_id for token in sample(logits, [row(seed=s, **params) for s in (1, 2)])] == [1, 0]


def test_tokens_follow_the_softmax():
    assert_distributed(draw(LOGITS), PROBS)


def test_tokens_of_many_seeds_and_many_samples_follow_the_softmax():
    logits = LOGITS.expand(NUM_DRAWS, -1)
    for name in ("seed", "sample_index"):
        tokens = sample(logits, [row(**{name: i}) for i in range(NUM_DRAWS)])
        assert_distributed([token.token_id for token in tokens], PROBS)


@pytest.mark.parametrize("temperature", [0.5, 2.0, 1e300])
def test_temperature_sharpens_below_1_and_flattens_above(temperature):
    powers = [p ** (1 / temperature) for p in PROBS]
    assert_distributed(draw(LOGITS, temperature=temperature), [p / sum(powers) for p in powers])


def test_top_k_keeps_the_k_most_likely():
    assert_distributed(draw(LOGITS, top_k=2), [4 / 7, 3 / 7, 0, 0, 0])
    assert draw(LOGITS, top_k=10**30) == draw(LOGITS)


@pytest.mark.parametrize("top_p, kept", [(0.001, 1), (0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.94, 4), (0.96, 5)])
def test_top_p_keeps_the_fewest_that_sum_to_p(top_p, kept):
    probs = [p / sum(PROBS[:kept]) for p in PROBS[:kept]] + [0.0] * (5 - kept)
    assert_distributed(draw(LOGITS, top_p=top_p), probs)


def test_top_p_applies_to_the_result_of_temperature_and_top_k():
    """0.4 and 0.3 of the first three are 82%. At temperature 0.5 the first token alone has 56%."""
    assert_distributed(draw(LOGITS, top_k=3, top_p=0.8), [4 / 7, 3 / 7, 0, 0, 0])
    assert set(draw(LOGITS, temperature=0.5, top_p=0.5)) == {0}


def test_first_of_equals_are_kept():
    assert set(draw(torch.tensor([1.0, 2.0, 1.0, 1.0]), top_k=3)) == {0, 1, 2}
    assert set(draw(torch.zeros(4), top_p=0.5)) == {0, 1}


@pytest.mark.parametrize("params", [{"temperature": 1e-300}, {"top_k": 1}, {"top_p": 1e-300}], ids=str)
def test_extreme_parameters_take_the_most_likely(params):
    assert set(draw(LOGITS.flip(0), **params)) == {4}


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.3, "top_k": 2}, {"top_p": 0.5}], ids=str)
def test_logprob_is_of_the_raw_logits(params):
    for position in range(20):
        (token,) = sample(LOGITS.half().unsqueeze(0), [row(position=position, **params)])
        assert token == SampledToken(token.token_id, pytest.approx(math.log(PROBS[token.token_id]), abs=1e-2))


# Seeds


def test_row_draws_the_same_alone_and_in_a_batch():
    kinds = [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 1.7, "top_k": 40, "top_p": 0.9}]
    rows = [row(seed=i, position=i, **kinds[i % len(kinds)]) for i in range(20)]
    logits = torch.randn(20, 100, generator=torch.Generator().manual_seed(0))
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(20)]
    assert [token.token_id for token in together] == [token.token_id for token in alone]


def test_global_generator_is_neither_used_nor_moved():
    before, state = draw(LOGITS), torch.get_rng_state()
    torch.manual_seed(0)
    assert draw(LOGITS) == before
    torch.set_rng_state(state)
    draw(LOGITS)
    assert torch.equal(torch.get_rng_state(), state)


def test_small_errors_in_the_logits_change_almost_no_token():
    """Batching changes float32 logits by 1e-5. Inverting the cumulative distribution would change many tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 1000, generator=generator)
    other = logits + 1e-5 * torch.randn(500, 1000, generator=generator)
    rows = [row(position=i) for i in range(500)]
    assert sum(a.token_id != b.token_id for a, b in zip(sample(logits, rows), sample(other, rows), strict=True)) <= 1


def generated(llm: LLM, prompts: list, params: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def test_seed_gives_the_same_text_in_a_batch_and_on_another_engine(checkpoint):
    def seeded(seed: int) -> SamplingParams:
        return SamplingParams(seed=seed, max_tokens=20, ignore_eos=True, top_k=50)

    (alone,) = generated(LLM(checkpoint), [[1, 5]], [seeded(0)])
    llm, other = LLM(checkpoint, seed=99), SamplingParams(max_tokens=30)
    assert generated(llm, [[1], [1, 5], [1, 5]], [other, seeded(0), seeded(8)])[1] == alone
    assert generated(llm, [[1, 5]], [seeded(8)])[0] != alone
    assert len(set(alone)) > 10, "each position has noise of its own"


def test_requests_without_a_seed_differ_and_repeat_with_the_seed_of_the_engine(checkpoint):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    texts = generated(LLM(checkpoint, seed=1), [[1, 5]] * 3, [params] * 3)
    assert len({tuple(text) for text in texts}) == 3
    assert generated(LLM(checkpoint, seed=1), [[1, 5]] * 3, [params] * 3) == texts
    assert generated(LLM(checkpoint, seed=2), [[1, 5]] * 3, [params] * 3) != texts


# Parameters that cannot be


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": math.nan},
        {"max_tokens": 0},
    ],
    ids=str,
)
def test_impossible_parameter_is_named_with_its_value(params):
    ((name, value),) = params.items()
    with pytest.raises(ValueError, match=f"^{name} must be .+ not {value}$"):
        SamplingParams(**params)


@pytest.mark.parametrize("stop", ["", ["a", ""]])
def test_empty_stop_string_is_an_error(stop):
    with pytest.raises(ValueError, match="stop must not contain an empty string"):
        SamplingParams(stop=stop)
