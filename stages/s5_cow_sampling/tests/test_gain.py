"""What this stage buys: n samples of a prompt cost one prompt, in the pool and in the model.

Counted in blocks held, blocks copied and tokens computed. The code of the stage before holds and computes all n times.
"""

from importlib import import_module

import pytest

from ..llm import LLM
from ..outputs import RequestOutput
from ..sampling import SamplingParams
from . import gain
from .helpers import CONFIG, write_checkpoint

N, BLOCK_SIZE = 8, 16


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_checkpoint(tmp_path_factory.mktemp("long"), CONFIG | {"max_position_embeddings": 256})
    return LLM(folder, block_size=BLOCK_SIZE, kv_cache_tokens=200 * BLOCK_SIZE)


def samples(llm: LLM, prompt: list[int], n: int, max_tokens: int = 5) -> RequestOutput:
    params = SamplingParams(n=n, temperature=1.0, seed=0, max_tokens=max_tokens, ignore_eos=True)
    return llm.generate([prompt], params)[0]


def prompt_of(num_tokens: int) -> list[int]:
    return [i % 319 + 1 for i in range(num_tokens)]


@pytest.mark.parametrize("num_tokens, num_copies", [(200, N - 1), (208, N - 1), (209, 0)])
def test_only_a_block_in_which_something_is_computed_is_copied_and_once_for_each_sample_but_the_last(
    llm, num_tokens, num_copies
):
    before = llm.kv_cache.num_blocks_copied
    samples(llm, prompt_of(num_tokens), N)
    assert llm.kv_cache.num_blocks_copied - before == num_copies


@pytest.mark.parametrize("num_tokens, num_full", [(200, 12), (208, 12), (209, 13)])
def test_the_full_blocks_of_the_prompt_are_held_once(llm, num_tokens, num_full):
    """And one block more for each sample: of 8 prompts of 200 tokens stage 4 held 104."""
    reports = []
    run = llm.model_runner.run

    def watched(batch: list) -> list:
        reports.append(llm.kv_cache_manager.report())
        return run(batch)

    llm.model_runner.run = watched
    try:
        samples(llm, prompt_of(num_tokens), N)
    finally:
        del llm.model_runner.run
    assert [report.held // BLOCK_SIZE for report in reports[:2]] == [-(-num_tokens // BLOCK_SIZE), num_full + N]
    tables = [table for table, _ in reports[1].tables]
    assert len(tables) == N and {table[:num_full] for table in tables} == {tables[0][:num_full]}


def test_the_prompt_goes_through_the_model_once(llm):
    """But for its last token, from which each sample goes on by itself."""
    before = llm.model_runner.num_tokens
    output = samples(llm, prompt_of(200), N)
    assert llm.model_runner.num_tokens - before == 199 + N * 5
    assert [len(completion.token_ids) for completion in output.outputs] == [5] * N


def test_what_they_say_is_what_each_says_alone(llm):
    """Sample i of n, whatever n is; and sample 0 is what a request without siblings says."""
    eight = [completion.token_ids for completion in samples(llm, prompt_of(200), N).outputs]
    assert len(set(map(tuple, eight))) == N
    for n in (1, 3):
        assert [completion.token_ids for completion in samples(llm, prompt_of(200), n).outputs] == eight[:n]


def test_the_gain_in_figures(tmp_path):
    """They are told at the end of the exercise, beside those of the stage before."""
    assert gain.now(import_module("..", __package__), tmp_path) == {
        "blocks held at once": 12 + N,
        "tokens through the model": 199 + N * 5,
    }
