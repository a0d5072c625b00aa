"""Logits processors: their definitions, and vLLM's order."""

import math
from collections import abc

import pytest
import torch

from .. import SamplingParams
from ..backends.torch.model_runner import sample_with_logprobs
from ..backends.torch.sampler import named_logprobs, sample
from ..requests.logits_processors import MinTokens, make_processors
from ..requests.tokens import SamplingRow, StepOutput

OUT = -math.inf


def processed(logits: list[float], output: list[int], prompt=(), stop=(), bad_words=(), **options) -> list[float]:
    """Return the logits after the processors for these parameters."""
    params = SamplingParams(**options)
    row = torch.tensor(logits)
    for processor in make_processors(params, [*prompt], {*stop, *params.stop_token_ids}, [*bad_words]):
        processor.apply(row, [*output])
    return [round(value, 4) for value in row.tolist()]


def test_default_params_change_nothing():
    for params in (SamplingParams(), SamplingParams(temperature=0.5, top_k=3, top_p=0.5, logprobs=3, n=2)):
        assert make_processors(params, [1, 2], {2}, []) == []


def test_only_allowed_tokens_keep_their_logits():
    assert processed([1.0, 2.0, 3.0, 4.0], [], allowed_token_ids=[2, 0, 2]) == [1, OUT, 3, OUT]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([], [0, 0, 0, OUT]),
        ([0], [0, OUT, 0, OUT]),
        ([0, 1], [0, 0, OUT, OUT]),
        ([2, 0, 1], [0, 0, OUT, OUT]),
        ([0, 2, 1], [0, 0, 0, OUT]),
        ([1, 0], [0, OUT, 0, OUT]),
    ],
)
def test_bad_word_is_not_completed(output, expected):
    assert processed([0.0] * 4, output, bad_words=[[3], [0, 1], [0, 1, 2]]) == expected


def test_bad_words_match_only_the_output():
    assert processed([0.0] * 3, [], prompt=[0], bad_words=[[0, 1]]) == [0, 0, 0]


@pytest.mark.parametrize(("output", "expected"), [([1, 1], [1, OUT, 3, OUT]), ([1, 1, 1], [1, 2, 3, 4])])
def test_no_stop_token_before_min_tokens(output, expected):
    assert processed([1.0, 2.0, 3.0, 4.0], output, stop=[1], stop_token_ids=[3], min_tokens=3) == expected


def test_biases_are_added():
    assert processed([1.0, 2.0, 3.0], [1], logit_bias={0: 2.5, 2: -1, 1: OUT}) == [3.5, OUT, 2]


def test_repetition_penalty_applies_to_tokens_of_prompt_and_output():
    assert processed([2.0, -2.0, 0.0, 2.0, -2.0], [3, 4, 3], prompt=[0, 2], repetition_penalty=2.0) == [1, -2, 0, 1, -4]
    assert processed([2.0, -2.0], [], prompt=[0, 1, 1], repetition_penalty=0.5) == [4, -1]


def test_presence_counts_once_and_frequency_each_time():
    options = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    assert processed([2.0, 2.0, 2.0], [1, 2, 1], prompt=[0, 0], **options) == [2, 1, 1.25]
    assert processed([2.0], [], **options) == [2]
    assert processed([2.0, 2.0], [1, 1, 1], presence_penalty=-1.0) == [2, 3]


@pytest.mark.parametrize(("min_p", "temperature"), [(0.05, 1.0), (0.3, 2.0), (1.0, 0.5)])
def test_min_p_keeps_tokens_relative_to_the_likeliest(temperature, min_p):
    logits = (3 * torch.randn(50, generator=torch.Generator().manual_seed(0))).tolist()
    probs = (torch.tensor(logits) / temperature).softmax(-1)
    rows = [SamplingRow(SamplingParams(min_p=min_p, temperature=temperature), seed, 0, 0) for seed in range(600)]
    tokens = {*sample(torch.tensor([logits] * len(rows)), rows).token_ids}
    kept = (probs >= min_p * probs.max() * (1 - 1e-6)).nonzero()[:, 0].tolist()
    assert tokens <= {*kept} and len(tokens) > 0.7 * len(kept) and len(kept) < 50


def test_order_is_vllms():
    """A bias comes before the penalties, which double its result here. The sampler applies min_p to the result."""
    options = {"logit_bias": {0: -3.0, 1: 1.0}, "repetition_penalty": 2.0, "frequency_penalty": 1.0, "min_p": 0.5}
    assert processed([1.0, 1.0, 0.9], [0, 1, 1], prompt=[0], **options) == [(1 - 3) * 2 - 1, (1 + 1) / 2 - 2, 0.9]


def test_grammar_that_forces_the_end_wins_over_min_tokens():
    for allow_if_required, logits, expected in (
        (True, [OUT, OUT, 5.0], [OUT, OUT, 5.0]),
        (True, [1.0, OUT, 5.0], [1.0, OUT, OUT]),
        (False, [OUT, OUT, 5.0], [OUT, OUT, OUT]),
    ):
        row = torch.tensor(logits)
        MinTokens(3, {2}, allow_if_required).apply(row, [0])
        assert row.tolist() == expected


# A step


class StubSequence:
    """The part of a sequence that a step reads."""

    def __init__(self, output: abc.Sequence[int] = (), **options) -> None:
        self.params, self.output_token_ids = SamplingParams(temperature=0.0, **options), [*output]
        self.logits_processors = make_processors(self.params, [], set(), [])

    is_plain = False

    def sampling_row(self, num_ahead: int) -> SamplingRow:
        return SamplingRow(self.params, 0, 0, 0)


def test_token_is_sampled_from_processed_logits_and_its_logprob_is_raw():
    logits = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0], [3.0, 1.0, 2.0]])
    raw, seqs = (
        logits.clone(),
        [StubSequence(), StubSequence(allowed_token_ids=[0]), StubSequence([0], logit_bias={0: -9}, logprobs=1)],
    )
    tokens = sample_with_logprobs(logits, seqs)
    assert tokens.token_ids == [1, 0, 2]
    assert tokens.logprobs == pytest.approx(
        [raw.log_softmax(-1)[row, each].item() for row, each in enumerate([1, 0, 2])]
    )
    assert torch.equal(logits, raw) and [*tokens.row(2).logprobs] == [0, 2]


def test_step_without_processors_copies_no_logits():
    seen = []

    def watched(logits, rows):
        seen.append(logits)
        return StepOutput([0], [0.0])

    logits = torch.zeros(1, 4, dtype=torch.bfloat16)
    sample_with_logprobs(logits, [StubSequence()], watched)
    unchanged = StubSequence(min_tokens=0, repetition_penalty=1.0, min_p=0.5)
    sample_with_logprobs(logits, [unchanged], watched)
    assert len(seen) == 2 and all(each is logits for each in seen)


@pytest.mark.parametrize("token_ids", [[4], [1, 0, 3]])
def test_named_logprobs_have_ranks(token_ids):
    logits = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log() + 2
    listed = named_logprobs(logits, token_ids)
    assert [*listed] == token_ids
    for token_id, entry in listed.items():
        assert entry.rank == token_id + 1 and entry.logprob == pytest.approx(logits[token_id].item() - 2, abs=1e-6)
