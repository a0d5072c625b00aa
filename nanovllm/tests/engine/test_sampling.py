"""The sampler: one token for each row of logits, drawn from the distribution that its parameters define."""

import math

import pytest
import torch
from torch import Tensor

from ...backends.torch import sampler
from ...backends.torch.sampler import (
    CHUNK,
    SEGMENT,
    RowParams,
    exponential_noise,
    likeliest,
    noise_key,
    sample,
    sample_from_all,
    sample_from_top_k,
)
from ...llm import LLM
from ...requests.sampling_params import SamplingParams
from ...requests.tokens import SampledToken, SamplingRow, StepOutput

PROBS = [0.4, 0.3, 0.15, 0.1, 0.05]
LOGITS = torch.tensor(PROBS).log() + 3  # a shift that softmax does not see
NUM_DRAWS = 1000


def row(seed: int = 0, position: int = 0, sample_index: int = 0, **params) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed, sample_index, position)


def draw(logits: Tensor, **params) -> list[int]:
    """Draw NUM_DRAWS tokens from the same logits, each with the noise of another position."""
    rows = [row(seed=5, position=i, **params) for i in range(NUM_DRAWS)]
    return sample(logits.expand(NUM_DRAWS, -1), rows).token_ids


def assert_drawn_from(tokens: list[int], probs: list[float]) -> None:
    """Assert a chi-square below 23.5, which 1 in 10,000 fair draws exceeds with 4 degrees of freedom."""
    counts = [tokens.count(i) for i in range(len(probs))]
    assert all(n == 0 for n, p in zip(counts, probs, strict=True) if p == 0), counts
    expected = [p * len(tokens) for p in probs]
    chi_square = sum((n - e) ** 2 / e for n, e in zip(counts, expected, strict=True) if e)
    assert chi_square < 23.5, (counts, expected)


# Greedy


def test_temperature_0_takes_the_likeliest_token():
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 3.0, 2.0]])
    assert sample(logits, [row(temperature=0.0, seed=s) for s in (1, 2)]).token_ids == [1, 0]


def test_greedy_takes_the_first_of_equally_likely_tokens():
    assert sample(torch.tensor([[1.0, 2.0, 2.0]]), [row(temperature=0.0)]).token_ids == [1]


def test_top_k_and_top_p_change_nothing_at_temperature_0():
    assert sample(LOGITS.unsqueeze(0), [row(temperature=0.0, top_k=3, top_p=0.1)]).token_ids == [0]


# The distribution


def test_tokens_are_drawn_from_the_softmax():
    assert_drawn_from(draw(LOGITS), PROBS)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_sharpens_below_1_and_flattens_above(temperature):
    powers = [p ** (1 / temperature) for p in PROBS]
    assert_drawn_from(draw(LOGITS, temperature=temperature), [p / sum(powers) for p in powers])


def test_top_k_draws_from_the_k_likeliest_tokens():
    assert_drawn_from(draw(LOGITS, top_k=2), [4 / 7, 3 / 7, 0, 0, 0])


@pytest.mark.parametrize("top_p, kept", [(0.001, 1), (0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.94, 4), (0.96, 5)])
def test_top_p_draws_from_the_fewest_tokens_that_sum_to_p(top_p, kept):
    assert_drawn_from(draw(LOGITS, top_p=top_p), [p / sum(PROBS[:kept]) for p in PROBS[:kept]] + [0.0] * (5 - kept))


def test_top_p_applies_after_top_k():
    """The first two tokens have 0.7 of all probabilities, but 0.82 of the three that top_k keeps."""
    assert_drawn_from(draw(LOGITS, top_k=3, top_p=0.8), [4 / 7, 3 / 7, 0, 0, 0])
    assert_drawn_from(draw(LOGITS, top_p=0.8), [p / 0.85 for p in PROBS[:3]] + [0, 0])


def test_top_k_beyond_the_vocabulary_keeps_all_tokens():
    assert draw(LOGITS, top_k=10**30) == draw(LOGITS, top_k=5) == draw(LOGITS)


def test_limits_keep_the_first_of_equally_likely_tokens():
    assert set(draw(torch.tensor([1.0, 2.0, 1.0, 1.0]), top_k=3)) == {0, 1, 2}
    assert set(draw(torch.zeros(4), top_p=0.5)) == {0, 1}
    assert set(draw(torch.zeros(4), top_k=3, top_p=0.5)) == {0, 1}


def test_a_row_without_limits_keeps_every_token_beside_a_limited_row():
    """The second token has a probability of 0.08, which top_p 0.5 excludes."""
    logits = torch.tensor([[10.0, 0.0]]).expand(400, -1)
    rows = [row(position=i, top_p=0.5 if i % 2 else 1.0, temperature=4.0) for i in range(400)]
    tokens = sample(logits, rows).token_ids
    assert sum(tokens[1::2]) == 0 < sum(tokens[::2])


@pytest.mark.parametrize("params", [{"temperature": 1e-300}, {"top_k": 1}, {"top_p": 1e-300}], ids=str)
def test_extreme_parameters_choose_the_likeliest_token(params):
    """1e-300 is 0 in float32."""
    assert set(draw(LOGITS.flip(0), **params)) == {4}


def test_a_huge_temperature_makes_all_tokens_equally_likely():
    assert_drawn_from(draw(LOGITS, temperature=1e300), [0.2] * 5)


def test_logits_may_have_half_precision():
    logits = torch.tensor(PROBS).log().half()
    assert_drawn_from(draw(logits), PROBS)
    token = sample(logits.unsqueeze(0), [row(temperature=0.0)]).row(0)
    assert token == SampledToken(0, pytest.approx(float(logits.float().log_softmax(dim=-1)[0]), abs=1e-6))


# Seeds


def test_draws_are_independent_of_torch_generators():
    before = draw(LOGITS)
    torch.manual_seed(0)
    first = torch.rand(3)
    torch.manual_seed(0)
    assert draw(LOGITS) == before
    assert torch.equal(torch.rand(3), first)


@pytest.mark.parametrize("at_once", [250, 1 << 20])  # two rows at a time, or all together
def test_a_row_draws_the_same_token_alone_and_in_any_batch(at_once, monkeypatch):
    monkeypatch.setattr(sampler, "MAX_IN_CACHE", at_once)
    variants = [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 1.7, "top_k": 40, "top_p": 0.9}]
    rows = [row(seed=i, position=i, **variants[i % len(variants)]) for i in range(20)]
    logits = torch.randn(20, 100, generator=torch.Generator().manual_seed(0))
    together = sample(logits, rows).token_ids
    assert together == [sample(logits[i : i + 1], rows[i : i + 1]).token_ids[0] for i in range(20)]
    assert together == sample(logits.flip(0), rows[::-1]).token_ids[::-1]


def generated(llm: LLM, prompts: list, params: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def test_a_seed_gives_the_same_text_alone_in_a_batch_and_on_another_engine(checkpoint):
    def seeded(seed: int) -> SamplingParams:
        return SamplingParams(seed=seed, max_tokens=20, ignore_eos=True, top_k=50)

    alone = generated(LLM(checkpoint), [[1, 5]], [seeded(0)])[0]  # 0 is a seed too
    llm = LLM(checkpoint, seed=99, kv_cache_tokens=256)
    for others in ([seeded(8), seeded(9)], [SamplingParams(max_tokens=30), SamplingParams(temperature=0.0)]):
        for place in range(3):
            prompts, params = [[1], [1, 2, 3]], list(others)
            prompts.insert(place, [1, 5])
            params.insert(place, seeded(0))
            assert generated(llm, prompts, params)[place] == alone
    assert generated(llm, [[1, 5]], [seeded(8)])[0] != alone


def test_requests_without_a_seed_differ_but_repeat_with_the_engines_seed(checkpoint):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    texts = generated(LLM(checkpoint, seed=1), [[1, 5]] * 3, [params] * 3)
    assert len({tuple(text) for text in texts}) == 3
    assert generated(LLM(checkpoint, seed=1), [[1, 5]] * 3, [params] * 3) == texts
    assert generated(LLM(checkpoint, seed=2), [[1, 5]] * 3, [params] * 3) != texts


def test_each_token_of_a_text_has_its_own_noise(checkpoint):
    """With equally likely tokens, 60 draws from 320 give about 54 different tokens."""
    params = SamplingParams(temperature=1e300, seed=3, max_tokens=60, ignore_eos=True)
    assert len(set(generated(LLM(checkpoint), [[1]], [params])[0])) > 40


# Log-probabilities


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.3, "top_k": 2}, {"top_p": 0.5}], ids=str)
def test_logprobs_are_computed_from_raw_logits(params):
    for position in range(20):
        token = sample(LOGITS.unsqueeze(0), [row(position=position, **params)]).row(0)
        assert isinstance(token, SampledToken)
        assert token == SampledToken(token.token_id, pytest.approx(math.log(PROBS[token.token_id]), abs=1e-6))


@pytest.mark.parametrize(("place", "num_copies"), [("cpu", 0), ("cuda", 0), ("mps", 1)])
def test_logits_are_copied_only_from_devices_without_float64(place, num_copies):
    copies: list[Tensor] = []

    class Logits(Tensor):
        device = torch.device(place)

        def __getitem__(self, rows: slice) -> Tensor:  # type: ignore[override]
            return values[rows]

        def cpu(self) -> Tensor:  # type: ignore[override]
            copies.append(values)
            return values

    values = torch.tensor([[1.0, 3.0, 2.0]])
    logits = values.as_subclass(Logits)
    assert sample(logits, [row(temperature=0.0)]).token_ids == [1] and len(copies) == num_copies


def test_no_rows_return_no_tokens():
    assert sample(torch.empty(0, 5), []).token_ids == []


# Invalid logits


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 2, "top_p": 0.5}], ids=str)
@pytest.mark.parametrize(
    "invalid",
    [[math.nan] * 5, [0.0, math.nan, 0.0, 1.0, 2.0], [0.0, math.inf, 0.0, 1.0, 2.0], [-math.inf] * 5],
    ids=str,
)
def test_an_error_names_the_row_with_invalid_logits(invalid, params):
    logits = torch.stack([LOGITS, torch.tensor(invalid), LOGITS])
    with pytest.raises(FloatingPointError, match="the logits of row 1 are NaN, infinite or all -inf"):
        sample(logits, [row(**params)] * 3)
    assert len(sample(logits[::2], [row(**params)] * 2).token_ids) == 2


def test_errors_count_rows_over_all_parts(monkeypatch):
    monkeypatch.setattr(sampler, "MAX_IN_CACHE", 10)  # two rows of five
    logits = torch.stack([LOGITS, LOGITS, LOGITS, torch.full((5,), math.nan)])
    with pytest.raises(FloatingPointError, match="the logits of row 3 are NaN"):
        sample(logits, [row()] * 4)


def test_logits_of_minus_infinity_exclude_tokens():
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    assert_drawn_from(draw(logits), [0, 0.5, 0, 0.5, 0])
    logits = torch.tensor([[-math.inf, 3.4e38, -3.4e38]])  # the largest float32 numbers are valid, too
    assert sample(logits, [row(temperature=0.0)]) == StepOutput([1], [0.0])


# The race: the same choice that sorting would make, with the same odds

SIZES = [1, 5, SEGMENT, SEGMENT + 1, CHUNK - 1, CHUNK, 2 * CHUNK + 3, 1000]


def some_logits(num_rows: int, vocab_size: int) -> Tensor:
    """Return logits in which every other row has many equal values, both zeros, and impossible tokens."""
    logits = 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    logits[::2] = logits[::2].round()  # with some -0.0
    logits[::2, ::7] = -math.inf
    logits[:, 0] = 1.0
    return logits


def row_params(num_rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = math.inf) -> RowParams:
    keys = torch.tensor([[noise_key(7, 0, position)] for position in range(num_rows)])
    temperatures, top_ks, top_ps = (torch.full((num_rows, 1), value) for value in (temperature, top_k, top_p))
    return RowParams(temperatures, top_ks, top_ps, torch.full((num_rows, 1), -math.inf), keys)


def probs_by_sorting(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return each token's probability, computed by sorting: float64 [num_rows, vocab_size]."""
    ordered, tokens = logits.double().sort(dim=-1, descending=True, stable=True)
    probs = ordered[:, : top_k or None].softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    probs = probs.masked_fill((before >= top_p) & (before > 0), 0)
    chances = torch.zeros_like(ordered).scatter_(1, tokens[:, : probs.shape[1]], probs)
    return chances / chances.sum(dim=-1, keepdim=True)


def assert_chances(tokens: Tensor, chances: Tensor) -> None:
    """Assert that no impossible token is drawn, and that chi-square is within 4 standard deviations.

    tokens [num_draws]; chances [vocab_size]
    """
    counts = tokens.bincount(minlength=len(chances)).double()
    assert not counts[chances == 0].any()
    expected = chances * len(tokens)
    is_often = expected >= 5
    rare = expected[~is_often].sum() + 1e-9  # all rare tokens together
    chi_square = ((counts - expected)[is_often] ** 2 / expected[is_often]).sum()
    chi_square += (counts[~is_often].sum() - rare) ** 2 / rare if rare >= 5 else 0
    freedom = int(is_often.sum())
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 8, (chi_square, freedom)


@pytest.mark.parametrize("vocab_size", SIZES)
def test_likeliest_returns_the_first_tokens_of_a_stable_sort(vocab_size):
    logits = some_logits(6, vocab_size)
    ordered = logits.sort(dim=-1, descending=True, stable=True).indices
    for k in {1, min(3, vocab_size), vocab_size // 2 + 1, vocab_size}:
        assert torch.equal(likeliest(logits, k), ordered[:, :k])


@pytest.mark.parametrize("vocab_size", [5, 40, 3 * CHUNK - 5])
@pytest.mark.parametrize("top_k, top_p", [(0, math.inf), (0, 0.9), (0, 0.5), (0, 0.05), (4, math.inf), (4, 0.8)])
def test_each_token_has_the_probability_that_sorting_gives_it(vocab_size, top_k, top_p):
    logits = some_logits(2, vocab_size)
    race = sample_from_top_k if top_k else sample_from_all
    for row, chances in zip(logits, probs_by_sorting(logits, top_k, top_p), strict=True):
        tokens = race(row.expand(1500, -1), row_params(1500, 1.0, top_k, top_p))
        assert_chances(tokens, chances)


@pytest.mark.full
@pytest.mark.parametrize("top_k, top_p", [(0, math.inf), (0, 0.3), (50, 0.95), (1000, 0.95)])
def test_probabilities_are_right_in_a_large_vocabulary(top_k, top_p):
    logits = some_logits(2, 128_256)
    race = sample_from_top_k if top_k else sample_from_all
    for row, chances in zip(logits, probs_by_sorting(logits, top_k, top_p), strict=True):
        each = row_params(1200, 1.0, top_k, top_p)
        parts = (RowParams(*(column[i : i + 8] for column in each)) for i in range(0, 1200, 8))
        assert_chances(torch.cat([race(row.expand(8, -1), part) for part in parts]), chances)


@pytest.mark.parametrize("top_p", [0.0, 1e-30, 1e-9])
def test_top_p_always_keeps_the_likeliest_token(top_p):
    logits = some_logits(50, 300)
    for race, top_k in ((sample_from_all, 0), (sample_from_top_k, 9)):
        assert torch.equal(race(logits, row_params(50, 1.0, top_k, top_p)), likeliest(logits, 1).squeeze(1))


# Noise


def test_noise_is_exponential():
    """Mean and variance are 1, and the largest distance from the distribution passes a Kolmogorov test at 1e-4."""
    keys = torch.tensor([[noise_key(seed, 0, 0)] for seed in range(100)])
    noise = exponential_noise(keys, torch.arange(2000)).double().flatten()
    assert noise.min() > 0 and abs(noise.mean() - 1) < 0.01 and abs(noise.var() - 1) < 0.03
    steps = torch.arange(1, len(noise) + 1) / len(noise)
    assert (1 - (-noise.sort().values).exp() - steps).abs().max() < 2.23 / math.sqrt(len(noise))


def test_noise_comes_from_splitmix64():
    """The first three numbers with seed 0, and a large one, in whose noise the lower half of its bits shows."""
    noise = exponential_noise(torch.tensor([[0]]), torch.tensor([0, 1, 2, 1869153]))[0]
    numbers = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xFFFFFFA8839C89E5)
    assert noise.tolist() == pytest.approx([-math.log1p(-number / 2**64) for number in numbers], rel=1e-6)


def test_noise_depends_on_key_and_place_only():
    keys = torch.tensor([[3], [2**63 - 1], [-(2**63)]])
    noise = exponential_noise(keys, torch.arange(50))
    assert torch.equal(noise[1:2, 7:9], exponential_noise(keys[1:2], torch.tensor([[7, 8]])))
    assert len(set(noise.flatten().tolist())) == 150


def test_noise_keys_depend_on_every_bit_of_the_seed_on_sample_and_position():
    keys = [noise_key(seed, 0, 0) for seed in (0, *(1 << bit for bit in range(63)), -1, -(2**63))]
    keys += [noise_key(0, 1, 0), noise_key(0, 0, 1), noise_key(0, 11, 1), noise_key(0, 1, 11)]
    assert len(set(keys)) == len(keys) and all(-(2**63) <= key < 2**63 for key in keys)
    assert noise_key(5, 1, 2) == noise_key(5, 1, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_device_draws_the_same_tokens():
    logits = some_logits(40, 5000)
    for race, top_k, top_p in ((sample_from_all, 0, math.inf), (sample_from_all, 0, 0.8), (sample_from_top_k, 40, 0.9)):
        each = row_params(40, 0.9, top_k, top_p)
        on_gpu = RowParams(*(column.cuda() for column in each))
        noise, gpu_noise = (
            exponential_noise(key, torch.arange(999, device=key.device)) for key in (each.key, on_gpu.key)
        )
        assert torch.equal(gpu_noise.cpu(), noise)
        assert torch.equal(race(logits.cuda(), on_gpu).cpu(), race(logits, each))


def test_ids_of_largest_tells_neighboring_floats_apart():
    """Each value has the next larger float beside it, on both sides of 0 and of 2, where bit 30 changes."""
    values = torch.tensor([-1e30, -3.0, -2.0, -1.0, -1e-30, 1e-30, 1.0, 2.0, 3.0, 1e30])
    both = torch.stack([values, torch.nextafter(values, torch.tensor(math.inf))]).T.flatten()  # ascending
    ids = torch.arange(len(both)).roll(7)[None]
    assert sampler.ids_of_largest(both[None], ids, len(both)).equal(ids.flip(1))
