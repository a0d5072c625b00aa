"""The gain of this stage, in steps of the model: no request waits for the longest one of its batch.

A static batch starts with as many requests as there are seats, and runs until its last member ends.
"""

from importlib import import_module

import pytest

from ..llm import LLM
from ..outputs import RequestOutput
from ..sampling import SamplingParams
from . import gain
from .gain import LENGTHS, PROMPTS


def greedy(lengths: list[int]) -> list[SamplingParams]:
    return [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def static_steps(lengths: list[int], seats: int) -> int:
    return sum(max(lengths[i : i + seats]) for i in range(0, len(lengths), seats))


@pytest.fixture(scope="module")
def alone(checkpoint) -> list[list[int]]:
    llm = LLM(checkpoint, block_size=4)
    return [tokens(llm.generate([prompt], each))[0] for prompt, each in zip(PROMPTS, greedy(LENGTHS), strict=True)]


@pytest.mark.parametrize("seats, num_static, num_steps", [(2, 106, 72), (4, 88, 43), (8, 55, 30)])
def test_a_seat_does_not_wait_for_the_longest_request(checkpoint, alone, seats, num_static, num_steps):
    assert static_steps(LENGTHS, seats) == num_static
    llm = LLM(checkpoint, block_size=4, max_num_seqs=seats, kv_cache_tokens=1000)
    assert tokens(llm.generate(PROMPTS, greedy(LENGTHS))) == alone
    assert llm.model_runner.num_steps == num_steps


def test_no_request_waits_for_blocks_that_another_one_may_never_need(checkpoint, alone):
    """Each request may need 16 of 32 blocks, and stops after two or three tokens. Stage 3 ran two at a time."""
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=32 * 4)
    stops = [SamplingParams(temperature=0.0, max_tokens=64, stop_token_ids=[said[1]]) for said in alone]
    lengths = [len(said) for said in tokens(llm.generate(PROMPTS, stops))]
    assert llm.model_runner.num_steps == max(lengths) < static_steps(lengths, seats=2)


def test_no_step_computes_more_tokens_than_the_budget_and_no_token_is_computed_twice(checkpoint):
    llm, sizes = LLM(checkpoint, block_size=4, max_num_batched_tokens=16), []
    run = llm.model_runner.run

    def watched(batch: list) -> list:
        sizes.append(sum(num_tokens for _, num_tokens in batch))
        return run(batch)

    llm.model_runner.run = watched
    llm.generate([[7 + i] * 50 for i in range(5)], greedy([5] * 5))
    assert max(sizes) == 16 and sum(sizes) == 5 * (50 + 4)


def test_the_gain_in_figures(tmp_path):
    assert gain.now(import_module("..", __package__), tmp_path) == {
        "steps for 16 requests on 4 seats": 43,
        "empty seats, summed over all steps": 43,
    }
