"""The race: the same choice as sorting would make, the same odds as noise for each token would give."""

import math

import pytest
import torch
from torch import Tensor

from ...backends.torch.sampler import (
    CHUNK,
    SEGMENT,
    RowParams,
    exponential_noise,
    keep_likelier,
    likeliest,
    noise_key,
    race_all,
    race_likeliest,
)

SIZES = [1, 5, SEGMENT, SEGMENT + 1, CHUNK - 1, CHUNK, 2 * CHUNK + 3, 1000]


def some_logits(num_rows: int, vocab_size: int) -> Tensor:
    """Every other row has many equals, as bfloat16 has, and both zeros, and tokens that cannot be."""
    logits = 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    logits[::2] = logits[::2].round()  # -0.0 is among them
    logits[::2, ::7] = -math.inf
    logits[:, 0] = 1.0
    return logits


def params(num_rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = math.inf) -> RowParams:
    keys = torch.tensor([[noise_key(7, 0, position)] for position in range(num_rows)])
    temperatures, top_ks, top_ps = (torch.full((num_rows, 1), value) for value in (temperature, top_k, top_p))
    return RowParams(temperatures, top_ks, top_ps, keys)


def probs_by_sorting(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """The plain twin: what each token's chance must be, by sorting. float64 [num_rows, vocab_size]"""
    ordered, tokens = logits.double().sort(dim=-1, descending=True, stable=True)
    probs = ordered[:, : top_k or None].softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    probs = probs.masked_fill((before >= top_p) & (before > 0), 0)
    chances = torch.zeros_like(ordered).scatter_(1, tokens[:, : probs.shape[1]], probs)
    return chances / chances.sum(dim=-1, keepdim=True)


def assert_chances(tokens: Tensor, chances: Tensor) -> None:
    """Nothing impossible, and chi-square within 4 standard deviations. tokens [num_draws], chances [vocab_size]"""
    counts = tokens.bincount(minlength=len(chances)).double()
    assert not counts[chances == 0].any()
    expected = chances * len(tokens)
    is_often = expected >= 5
    rare = expected[~is_often].sum() + 1e-9  # all others together
    chi_square = ((counts - expected)[is_often] ** 2 / expected[is_often]).sum()
    chi_square += (counts[~is_often].sum() - rare) ** 2 / rare if rare >= 5 else 0
    freedom = int(is_often.sum())
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 8, (chi_square, freedom)


# The order: the likeliest first, and of equals the first


@pytest.mark.parametrize("vocab_size", SIZES)
def test_the_likeliest_are_the_first_of_a_stable_sort(vocab_size):
    logits = some_logits(6, vocab_size)
    ordered = logits.sort(dim=-1, descending=True, stable=True).indices
    for k in {1, min(3, vocab_size), vocab_size // 2 + 1, vocab_size}:
        assert torch.equal(likeliest(logits, k), ordered[:, :k])


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_what_is_likelier_than_a_token_comes_before_it_in_a_stable_sort(num_chunks):
    probs = some_logits(4, num_chunks * CHUNK).softmax(dim=-1)
    ordered = probs.sort(dim=-1, descending=True, stable=True).indices
    for place in (0, 1, 5, CHUNK // 2):
        kept = keep_likelier(probs.view(4, -1, CHUNK), ordered[:, place]).view(4, -1)
        assert torch.equal(
            kept, torch.zeros_like(probs).scatter(1, ordered[:, :place], probs.gather(1, ordered[:, :place]))
        )


# The odds


@pytest.mark.parametrize("vocab_size", [5, 40, 3 * CHUNK - 5])
@pytest.mark.parametrize("top_k, top_p", [(0, math.inf), (0, 0.9), (0, 0.5), (0, 0.05), (4, math.inf), (4, 0.8)])
def test_each_token_has_the_chance_that_sorting_gives_it(vocab_size, top_k, top_p):
    logits = some_logits(2, vocab_size)
    race = race_likeliest if top_k else race_all
    for row, chances in zip(logits, probs_by_sorting(logits, top_k, top_p), strict=True):
        tokens = race(row.expand(6000, -1), params(6000, 1.0, top_k, top_p))
        assert_chances(tokens, chances)


@pytest.mark.full
@pytest.mark.parametrize("top_k, top_p", [(0, math.inf), (0, 0.9), (0, 0.3), (50, 0.95), (1000, 0.95)])
def test_each_token_has_its_chance_in_a_real_vocabulary(top_k, top_p):
    logits = some_logits(2, 128_256)
    race = race_likeliest if top_k else race_all
    for row, chances in zip(logits, probs_by_sorting(logits, top_k, top_p), strict=True):
        each = params(4000, 1.0, top_k, top_p)
        parts = (RowParams(*(column[i : i + 8] for column in each)) for i in range(0, 4000, 8))
        assert_chances(torch.cat([race(row.expand(8, -1), part) for part in parts]), chances)


@pytest.mark.parametrize("top_p", [0.0, 1e-30, 1e-9])
def test_the_likeliest_token_is_always_left(top_p):
    logits = some_logits(50, 300)
    for race, top_k in ((race_all, 0), (race_likeliest, 9)):
        assert torch.equal(race(logits, params(50, 1.0, top_k, top_p)), likeliest(logits, 1).squeeze(1))


# The noise


def test_noise_is_exponential():
    """Mean and variance are 1; the largest distance from the distribution is what Kolmogorov grants 1 in 10,000."""
    keys = torch.tensor([[noise_key(seed, 0, 0)] for seed in range(100)])
    noise = exponential_noise(keys, torch.arange(2000)).double().flatten()
    assert noise.min() > 0 and abs(noise.mean() - 1) < 0.01 and abs(noise.var() - 1) < 0.03
    steps = torch.arange(1, len(noise) + 1) / len(noise)
    assert (1 - (-noise.sort().values).exp() - steps).abs().max() < 2.23 / math.sqrt(len(noise))


def test_noise_is_made_of_known_random_numbers():
    """splitmix64 of the seed 0 begins with 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F."""
    noise = exponential_noise(torch.tensor([[0]]), torch.arange(3))[0]
    numbers = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    assert noise.tolist() == pytest.approx([-math.log1p(-number / 2**64) for number in numbers], rel=1e-6)


def test_noise_is_a_function_of_key_and_place():
    keys = torch.tensor([[3], [2**63 - 1], [-(2**63)]])
    noise = exponential_noise(keys, torch.arange(50))
    assert torch.equal(noise[1:2, 7:9], exponential_noise(keys[1:2], torch.tensor([[7, 8]])))
    assert len(set(noise.flatten().tolist())) == 150


def test_every_bit_of_a_seed_matters_and_so_do_sample_and_position():
    keys = [noise_key(seed, 0, 0) for seed in (0, *(1 << bit for bit in range(63)), -1, -(2**63))]
    keys += [noise_key(0, 1, 0), noise_key(0, 0, 1), noise_key(0, 11, 1), noise_key(0, 1, 11)]
    assert len(set(keys)) == len(keys) and all(-(2**63) <= key < 2**63 for key in keys)
    assert noise_key(5, 1, 2) == noise_key(5, 1, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_device_makes_the_same_noise_and_draws_the_same():
    logits = some_logits(40, 5000)
    for race, top_k, top_p in ((race_all, 0, math.inf), (race_all, 0, 0.8), (race_likeliest, 40, 0.9)):
        each = params(40, 0.9, top_k, top_p)
        there = RowParams(*(column.cuda() for column in each))
        noise, noise_there = (
            exponential_noise(key, torch.arange(999, device=key.device)) for key in (each.key, there.key)
        )
        assert torch.equal(noise_there.cpu(), noise)
        assert torch.equal(race(logits.cuda(), there).cpu(), race(logits, each))
