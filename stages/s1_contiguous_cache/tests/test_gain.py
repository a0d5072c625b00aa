"""The gain of this stage: the keys and values of a token are computed once, not again for each new token."""

from importlib import import_module

import pytest

from ..llama import LlamaForCausalLM
from ..llm import LLM
from ..sampling import SamplingParams
from . import gain
from .helpers import greedy_without_cache

PROMPT = [1, 300, 301, 302, 303]


@pytest.fixture
def counted(monkeypatch) -> list[int]:
    """Return a list that gets the number of tokens of each run of the model."""
    counts: list[int] = []
    forward = LlamaForCausalLM.forward

    def count(model, input_ids, positions, attend):
        counts.append(len(input_ids))
        return forward(model, input_ids, positions, attend)

    monkeypatch.setattr(LlamaForCausalLM, "forward", count)
    return counts


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def test_prompt_is_computed_once_and_then_one_token_in_each_step(checkpoint, counted):
    LLM(checkpoint).generate([PROMPT], greedy(12))
    assert counted == [5] + [1] * 11


def test_cache_computes_16_tokens_instead_of_126(checkpoint, model, counted):
    """A prompt of 5 tokens and 12 new ones: 5 + 12 - 1 with a cache, 5 + 6 + ... + 16 without. The text is the same."""
    without = greedy_without_cache(model, PROMPT, 12)
    assert sum(counted) == sum(range(5, 17)) == 126
    counted.clear()
    (output,) = LLM(checkpoint).generate([PROMPT], greedy(12))
    assert sum(counted) == 16
    assert output.outputs[0].token_ids == without


@pytest.mark.parametrize("num_slots", [64, 1000])
def test_batch_computes_no_token_twice(checkpoint, counted, num_slots):
    prompts, lengths = [[1] * n for n in (1, 7, 20, 3)], [4, 1, 9, 16]
    llm = LLM(checkpoint, kv_cache_tokens=num_slots)
    llm.generate(prompts, [greedy(n) for n in lengths])
    assert sum(counted) == sum(map(len, prompts)) + sum(lengths) - len(prompts) == llm.model_runner.num_tokens
    assert len(counted) == llm.model_runner.num_steps


def test_batch_takes_as_many_steps_as_its_longest_output(checkpoint, counted):
    LLM(checkpoint).generate([PROMPT] * 3, [greedy(n) for n in (4, 9, 2)])
    assert counted == [15, 3, 2, 2, 1, 1, 1, 1, 1]


def test_gain_in_figures(tmp_path):
    """`make check` prints them at the end of the exercise, next to those without a cache."""
    assert gain.now(import_module("..", __package__), tmp_path) == {
        "tokens through the model, for 12 new ones": 16,
        "of these, in the last step": 1,
    }
