"""What this stage buys: nobody waits for the longest of a batch, and nobody for what others may come to need.

Counted in steps of the model. A static batch runs until its last member ends, and starts with as many as have a seat.
"""

from importlib import import_module

import pytest

from ..llm import LLM
from ..outputs import RequestOutput
from ..sampling import SamplingParams
from . import gain

LENGTHS = [30, 3, 4, 2, 5, 28, 3, 6, 2, 4, 3, 5, 2, 25, 4, 3]  # a few long answers among short ones
PROMPTS = [[1 + i] * (1 + i % 5) for i in range(16)]


def greedy(lengths: list[int]) -> list[SamplingParams]:
    return [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def static_steps(lengths: list[int], seats: int) -> int:
    """Each batch takes as many steps as its longest member has tokens."""
    return sum(max(lengths[i : i + seats]) for i in range(0, len(lengths), seats))


@pytest.fixture(scope="module")
def alone(checkpoint) -> list[list[int]]:
    llm = LLM(checkpoint, block_size=4)
    return [tokens(llm.generate([prompt], each))[0] for prompt, each in zip(PROMPTS, greedy(LENGTHS), strict=True)]


@pytest.mark.parametrize("seats, num_static, num_steps", [(2, 106, 72), (4, 88, 43), (8, 55, 30)])
def test_seats_do_not_wait_for_the_longest(checkpoint, alone, seats, num_static, num_steps):
    assert static_steps(LENGTHS, seats) == num_static
    llm = LLM(checkpoint, block_size=4, max_num_seqs=seats, kv_cache_tokens=1000)
    assert tokens(llm.generate(PROMPTS, greedy(LENGTHS))) == alone
    assert llm.model_runner.num_steps == num_steps


def test_blocks_do_not_wait_for_what_may_come(checkpoint, alone):
    """Each may come to 64 tokens, 16 blocks of 32, and stops after one or two: stage 3 ran two at a time."""
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=32 * 4)
    stops = [full[1] for full in alone]
    outputs = llm.generate(
        PROMPTS, [SamplingParams(temperature=0.0, max_tokens=64, stop_token_ids=[stop]) for stop in stops]
    )
    lengths = [full.index(stop) + 1 for full, stop in zip(alone, stops, strict=True)]
    assert tokens(outputs) == [full[:n] for full, n in zip(alone, lengths, strict=True)]
    assert llm.model_runner.num_steps == max(lengths) < static_steps(lengths, seats=2)


def test_no_step_is_longer_than_its_budget(checkpoint, alone):
    """Five prompts of 50 tokens come with short ones: in stage 3 all were one step. Nothing is computed twice."""
    llm = LLM(checkpoint, block_size=4, max_num_batched_tokens=16)
    sizes = watch_sizes(llm)
    outputs = llm.generate([*PROMPTS[:4], *([7 + i] * 50 for i in range(5))], greedy([*LENGTHS[:4], *[5] * 5]))
    assert tokens(outputs)[:4] == alone[:4]
    assert max(sizes) == 16
    assert sum(sizes) == sum(len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1 for output in outputs)


def watch_sizes(llm: LLM) -> list[int]:
    """How many tokens each step computes."""
    run, sizes = llm.model_runner.run, []

    def watched(batch: list) -> list:
        sizes.append(sum(num_tokens for _, num_tokens in batch))
        return run(batch)

    llm.model_runner.run = watched
    return sizes


def test_the_gain_in_figures(tmp_path):
    """They are told at the end of the exercise, beside those of the stage before."""
    assert gain.now(import_module("..", __package__), tmp_path) == {
        "steps for 16 requests on 4 seats": 43,
        "seats that are empty, all steps added up": 43,
    }
