"""SamplingParams change random logits exactly like the processors of transformers."""

import random

import pytest
import torch
from transformers import generation

from nanovllm import SamplingParams
from nanovllm.backends.torch.sampler import ban_improbable, row_params, sample
from nanovllm.requests.logits_processors import make_processors
from nanovllm.requests.tokens import SamplingRow

VOCAB = 40


def ours(logits: torch.Tensor, prompt: list[int], output: list[int], bad_words: list[list[int]], **options):
    """Return the logits that nanovllm computes. logits, out [vocab_size]."""
    params = SamplingParams(**options)
    row = logits.clone()
    for processor in make_processors(params, prompt, {0, *params.stop_token_ids}, bad_words):
        processor.apply(row, output)
    return row


def case(seed: int):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
    output = [rng.randrange(VOCAB) for _ in range(rng.randrange(12))]
    return rng, torch.randn(VOCAB, generator=generator) * 3, prompt, output


def check(theirs, token_ids: list[int], logits: torch.Tensor, ours: torch.Tensor) -> None:
    expected = theirs(torch.tensor([token_ids], dtype=torch.int64), logits.unsqueeze(0).clone())[0]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_repetition_penalty(seed):
    rng, logits, prompt, output = case(seed)
    penalty = rng.choice([0.5, 0.9, 1.2, 3.0])
    theirs = generation.RepetitionPenaltyLogitsProcessor(penalty)
    check(theirs, prompt + output, logits, ours(logits, prompt, output, [], repetition_penalty=penalty))


@pytest.mark.parametrize("seed", range(20))
def test_logit_bias(seed):
    rng, logits, prompt, output = case(seed)
    bias = {rng.randrange(VOCAB): rng.uniform(-5, 5) for _ in range(5)}
    theirs = generation.SequenceBiasLogitsProcessor([[[token_id], value] for token_id, value in bias.items()])
    check(theirs, prompt + output, logits, ours(logits, prompt, output, [], logit_bias=bias))


@pytest.mark.parametrize("seed", range(40))
def test_bad_words(seed):
    """The processor of transformers looks at the prompt too, so it gets the output alone, after an unrelated token."""
    rng, logits, prompt, output = case(seed)
    output = [token_id % 4 for token_id in output]  # so that the beginnings of words occur
    words = [[rng.randrange(4) for _ in range(rng.randrange(1, 4))] for _ in range(4)]
    theirs = generation.NoBadWordsLogitsProcessor(words)
    check(theirs, [VOCAB - 1, *output], logits, ours(logits, prompt, output, words))


@pytest.mark.parametrize("seed", range(10))
def test_min_tokens(seed):
    rng, logits, prompt, output = case(seed)
    min_tokens, stop = rng.randrange(1, 14), rng.randrange(1, VOCAB)
    theirs = generation.MinNewTokensLengthLogitsProcessor(len(prompt), min_tokens, [0, stop], device="cpu")
    row = ours(logits, prompt, output, [], min_tokens=min_tokens, stop_token_ids=[stop])
    check(theirs, prompt + output, logits, row)


@pytest.mark.parametrize("seed", range(20))
def test_min_p_with_a_temperature(seed):
    rng, logits, prompt, output = case(seed)
    min_p, temperature = rng.choice([0.02, 0.1, 0.5]), rng.choice([0.5, 1.0, 1.7])
    warpers = [generation.TemperatureLogitsWarper(temperature), generation.MinPLogitsWarper(min_p)]
    theirs = generation.LogitsProcessorList(warpers)
    params = SamplingParams(min_p=min_p, temperature=temperature)
    [row] = ban_improbable(logits[None], row_params([SamplingRow(params, seed, 0, 0)], logits.device))
    check(theirs, prompt + output, logits, row / temperature)


@pytest.mark.parametrize("seed", range(20))
def test_top_k_and_top_p_with_penalties(seed):
    rng, logits, prompt, output = case(seed)
    top_k, top_p, penalty = rng.choice([0, 1, 5, 100]), rng.choice([0.3, 0.9, 1.0]), 1.3
    chain = [generation.RepetitionPenaltyLogitsProcessor(penalty), generation.TemperatureLogitsWarper(0.8)]
    chain += [generation.TopKLogitsWarper(top_k)] if top_k else []
    chain += [generation.TopPLogitsWarper(top_p)]
    expected = generation.LogitsProcessorList(chain)(torch.tensor([prompt + output]), logits.unsqueeze(0).clone())[0]
    row = ours(logits, prompt, output, [], repetition_penalty=penalty)
    params = SamplingParams(top_k=top_k, top_p=top_p, temperature=0.8)
    drawn = sample(row.expand(2000, -1), [SamplingRow(params, seed, 0, position) for position in range(2000)])
    counts = torch.tensor(drawn.token_ids).bincount(minlength=VOCAB)
    chances = expected.softmax(dim=-1)  # [vocab_size]
    assert not counts[chances == 0].any() and counts[chances > 0.01].all()
    torch.testing.assert_close(counts / 2000, chances, atol=0.05, rtol=0)
