"""The sampling kernels return the plain sampler's tokens, for random rows with every combination of parameters."""

import math
import random

import pytest
import torch

from ...backends.gpu.ops import PLAIN, triton_ops
from ...backends.gpu.sampler import Sampling, params_on_device
from ...backends.gpu.tiles import SamplingWorkspace
from ...backends.torch.sampler import CHUNK, invalid_logits_message, sample
from ...requests.sampling_params import SamplingParams
from ...requests.tokens import SamplingRow
from .pools import DTYPES

OPS = ["plain", "kernel"]


@pytest.fixture(params=OPS)
def run(request: pytest.FixtureRequest):
    """Return a function that samples rows with the kernels or their plain version."""
    is_plain = request.param == "plain"
    device = "cpu" if is_plain else request.getfixturevalue("device")
    return lambda logits, rows: sample_on_device(PLAIN if is_plain else triton_ops(), logits.to(device), rows)


def sample_on_device(ops, logits: torch.Tensor, rows: list[SamplingRow]):
    tokens, out = logits.new_empty(len(rows), dtype=torch.int64), logits.new_empty(len(rows), 2, dtype=torch.float32)
    workspace = SamplingWorkspace(*logits.shape, logits.device)
    ops.sample_rows(logits, params_on_device(rows, logits.device), workspace, tokens, out)
    assert tokens.tolist() == out[:, 0].long().tolist()
    return Sampling(out).read()


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    temperature = rng.choice([0.0, 0.1, 0.7, 1.0, 1.0, 3.0])
    top_k = rng.choice([0, 0, 1, 2, 7, 50, vocab_size // 2, vocab_size - 1, vocab_size, 10 * vocab_size])
    top_p = rng.choice([1.0, 1.0, 1e-6, 0.05, 0.5, 0.9, 0.999])
    return SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=rng.choice([0, 0, 0, 0.01, 0.5, 1]))


def random_rows(seed: int, num_rows: int, vocab_size: int, dtype: torch.dtype):
    """Return logits and rows. Some logits are -inf, and some are tied: few different values, or all the same."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    logits = rng.choice([0.3, 2.0, 8.0]) * torch.randn(num_rows, vocab_size, generator=generator)
    for row in logits:
        shape = rng.randrange(5)
        if shape == 1:
            row.round_()
        elif shape == 2:
            row[torch.rand(vocab_size, generator=generator) < 0.9] = -math.inf
            row[rng.randrange(vocab_size)] = 0.0
        elif shape == 3:
            row.fill_(rng.choice([-1.0, 0.0, 2.5]))
    rows = [SamplingRow(random_params(rng, vocab_size), rng.getrandbits(63), i, i) for i in range(num_rows)]
    return logits.to(dtype), rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("vocab_size", "num_rows"),
    [(5, 30), (CHUNK, 20), (1000, 30), (17 * CHUNK + 1, 20)]
    + [pytest.param(*each, marks=pytest.mark.full) for each in [(300, 300), (5000, 60), (151_936, 8)]],
)
def test_tokens_match_the_plain_sampler(run, vocab_size: int, num_rows: int, dtype: torch.dtype) -> None:
    logits, rows = random_rows(vocab_size, num_rows, vocab_size, dtype)
    result, expected = run(logits, rows), sample(logits, rows)
    different = [i for i in range(num_rows) if result.token_ids[i] != expected.token_ids[i]]
    assert not different, [(rows[i].params, result.row(i), expected.row(i)) for i in different]
    assert result.logprobs == pytest.approx(expected.logprobs, abs=2e-5)


def test_the_kth_of_equal_logits_is_the_lowest_id(run) -> None:
    logits = torch.zeros(60, 600)
    logits[:, ::2] = 1.0
    rows = [SamplingRow(SamplingParams(top_k=k), seed, 0, 0) for k in (1, 150) for seed in range(30)]
    tokens = run(logits, rows).token_ids
    assert set(tokens[:30]) == {0} and max(tokens[30:]) < 300 and not any(token % 2 for token in tokens)
    assert len(set(tokens[30:])) > 20


def test_greedy_ties_go_to_the_lowest_token_id_across_chunks(run) -> None:
    logits = torch.zeros(3, 40 * CHUNK)
    logits[1, [CHUNK - 1, CHUNK]] = 2.0
    logits[2, [CHUNK, 30 * CHUNK]] = 2.0
    rows = [SamplingRow(SamplingParams(temperature=0), 0, 0, 0)] * 3
    assert run(logits, rows).token_ids == [0, CHUNK - 1, CHUNK]


PARAMS = [{"temperature": 0.0}, {}, {"top_k": 5, "min_p": 0.1}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.5}]


@pytest.mark.parametrize("place", [slice(None), 0, -1])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_row_without_probabilities_is_named_in_the_error(run, params, value, place) -> None:
    if value == -math.inf and place != slice(None):
        pytest.skip("a single -inf leaves the other tokens")
    logits = torch.randn(3, 3 * CHUNK, generator=torch.Generator().manual_seed(0))
    logits[1, place] = value
    with pytest.raises(FloatingPointError, match=invalid_logits_message(1)):
        run(logits, [SamplingRow(SamplingParams(**params), i, 0, 0) for i in range(3)])


def test_logits_may_be_part_of_a_wider_buffer(run) -> None:
    logits, rows = random_rows(0, 8, 300, torch.float32)
    wider = torch.cat((logits, torch.full((8, 50), 99.0)), dim=1)
    assert run(wider[:, :300], rows) == run(logits, rows)


def test_the_host_waits_for_nothing_before_it_reads_the_tokens(monkeypatch) -> None:
    """Each of these reads would wait for a GPU."""
    reads: list[str] = []
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero", "cpu", "numpy"):
        real = getattr(torch.Tensor, name)
        call = lambda x, *args, name=name, real=real: reads.append(name) or real(x, *args)  # noqa: E731
        monkeypatch.setattr(torch.Tensor, name, call)
    _, rows = random_rows(0, 40, 300, torch.float32)
    params_on_device(rows, torch.device("cpu"))
    sampling = Sampling(torch.tensor([[5.0, -1.0]]))
    assert reads == [] and sampling.read().token_ids == [5] and reads == ["numpy"]
