"""Beam search, compared with a plain one that caches nothing. Of the model's 320 tokens, 20 are stop tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from torch import Tensor

from ..beam_search import BeamSearchParams
from ..llm import LLM
from ..outputs import RequestOutput
from ..sampling import SamplingParams
from .helpers import CONFIG, next_logits, write_checkpoint

PROMPTS = [[1, 5, 9], [1, 300, 301, 302, 303], list(range(3, 15)), [1]]
ENDINGS = list(range(10, 320, 16))
Logprobs = Callable[[list[int]], Tensor]


class Beam(NamedTuple):
    token_ids: list[int]
    logprob: float

    def score(self, num_tokens: int, length_penalty: float) -> float:
        return self.logprob / num_tokens**length_penalty


def plain_beam_search(
    logprobs: Logprobs, prompt: list[int], params: BeamSearchParams, endings: list[int] = ENDINGS
) -> list[Beam]:
    """Return the best beams, best first. Each step sorts all continuations of all beams."""
    max_tokens, penalty = min(params.max_tokens, 64 - len(prompt)), params.length_penalty
    running, ended = [Beam([], 0.0)], list[Beam]()
    while running:
        longer = [
            Beam([*beam.token_ids, token_id], beam.logprob + logprob)
            for beam in running
            for token_id, logprob in enumerate(logprobs(prompt + beam.token_ids).tolist())
        ]
        longer.sort(key=lambda beam: -beam.logprob)
        at_end = [beam.token_ids[-1] in endings or len(beam.token_ids) == max_tokens for beam in longer]
        ended += [beam for beam, is_at_end in zip(longer[: params.beam_width], at_end, strict=False) if is_at_end]
        ended = sorted(ended, key=lambda beam: -beam.score(len(beam.token_ids), penalty))[: params.beam_width]
        running = [beam for beam, is_at_end in zip(longer, at_end, strict=True) if not is_at_end][: params.beam_width]
        if running and len(ended) == params.beam_width:
            may_gain = params.early_stopping == "never" and penalty > 0
            hope = running[0].score(max_tokens if may_gain else len(running[0].token_ids), penalty)
            if params.early_stopping is True or hope <= ended[-1].score(len(ended[-1].token_ids), penalty):
                break
    return ended


@pytest.fixture(scope="module")
def ending(tmp_path_factory, tokenizer_model) -> Path:
    config = CONFIG | {"eos_token_id": ENDINGS}
    return write_checkpoint(tmp_path_factory.mktemp("ending"), config, tokenizer_model=tokenizer_model)


@pytest.fixture(scope="module")
def logprobs(model) -> Logprobs:
    known: dict[tuple[int, ...], Tensor] = {}

    def compute(token_ids: list[int]) -> Tensor:
        if (key := tuple(token_ids)) not in known:
            known[key] = next_logits(model, token_ids).log_softmax(dim=-1)
        return known[key]

    return compute


def assert_same(output: RequestOutput, expected: list[Beam]) -> None:
    token_ids = [completion.token_ids for completion in output.outputs]
    assert token_ids == [beam.token_ids for beam in expected], "the beams are others, or in another order"
    logprobs = [completion.cumulative_logprob for completion in output.outputs]
    assert logprobs == pytest.approx([beam.logprob for beam in expected], rel=1e-4), "their log-probabilities differ"


def assert_all_free(llm: LLM) -> None:
    llm.kv_cache_manager.check_integrity()
    assert llm.kv_cache_manager.num_free_blocks == llm.kv_cache_manager.num_blocks


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("width, length_penalty", [(3, 0.0), (3, 1.0), (3, -1.0), (1, 1.0)])
def test_beams_match_a_search_without_a_cache(ending, logprobs, width, length_penalty, early_stopping):
    params = BeamSearchParams(width, 10, length_penalty=length_penalty, early_stopping=early_stopping)
    llm = LLM(ending, block_size=4, kv_cache_tokens=256)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        assert_same(output, plain_beam_search(logprobs, prompt, params))
        for completion in output.outputs:
            assert completion.finish_reason == ("stop" if completion.token_ids[-1] in ENDINGS else "length")
    assert_all_free(llm)


@pytest.mark.parametrize("width", [1, 2])
def test_enough_beams_go_on_even_if_the_best_continuations_all_end(tmp_path, logprobs, width):
    """There are more stop tokens than twice the width, and they are the most likely first tokens."""
    endings = logprobs(PROMPTS[0]).topk(2 * width + 1).indices.tolist()
    write_checkpoint(tmp_path, CONFIG | {"eos_token_id": endings})
    params = BeamSearchParams(width, 6, length_penalty=2.0, early_stopping="never")
    expected = plain_beam_search(logprobs, PROMPTS[0], params, endings)
    assert max(len(beam.token_ids) for beam in expected) > 1, "all beams have ended: none went on"
    assert_same(LLM(tmp_path, block_size=4).beam_search([PROMPTS[0]], params)[0], expected)


@pytest.mark.parametrize("prompt", [[1, 157, 285, 152, 66], [1, 311, 283, 303, 150]], ids=str)
def test_search_goes_on_while_the_likeliest_beam_can_win(ending, logprobs, prompt):
    """The least likely beam cannot win any more in an earlier step."""
    params = BeamSearchParams(2, 8, length_penalty=1.0)
    [output] = LLM(ending, block_size=4).beam_search([prompt], params)
    assert_same(output, plain_beam_search(logprobs, prompt, params))


def test_ignore_eos_goes_on_to_max_tokens(ending, logprobs):
    params = BeamSearchParams(3, 8, ignore_eos=True)
    [output] = LLM(ending, block_size=4).beam_search([PROMPTS[0]], params)
    assert_same(output, plain_beam_search(logprobs, PROMPTS[0], params, endings=[]))


def test_beams_end_at_max_model_len(ending, logprobs):
    params, prompt = BeamSearchParams(3, 16, length_penalty=2.0, early_stopping="never"), list(range(1, 61))
    [output] = LLM(ending, block_size=4).beam_search([prompt], params)
    assert_same(output, plain_beam_search(logprobs, prompt, params))
    assert max(len(completion.token_ids) for completion in output.outputs) == 4


@pytest.mark.parametrize("budget", [2, 5, 512])
def test_beams_do_not_depend_on_the_budget_of_a_step(ending, logprobs, budget):
    """Budgets smaller than the width, and than the prompt of 12 tokens."""
    params = BeamSearchParams(5, 10)
    llm = LLM(ending, block_size=4, kv_cache_tokens=192, max_num_batched_tokens=budget)
    assert_same(llm.beam_search([PROMPTS[2]], params)[0], plain_beam_search(logprobs, PROMPTS[2], params))
    assert_all_free(llm)


def test_beams_compute_and_hold_shared_tokens_once(checkpoint):
    """A prompt of 40 tokens fills 10 blocks, and 4 beams of 6 more tokens have at most 2 of their own."""
    llm = LLM(checkpoint, block_size=4)
    llm.beam_search([list(range(1, 41))], BeamSearchParams(4, 7, ignore_eos=True))
    assert llm.model_runner.num_tokens == 40 + 6 * 4
    assert llm.peak.held <= (10 + 4 * 2) * 4


def test_a_search_that_runs_out_of_blocks_ends_with_an_error_and_frees_them(checkpoint):
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=16)
    params = BeamSearchParams(3, 10, ignore_eos=True)
    failed, served = llm.beam_search([PROMPTS[2], [1, 2]], params)[0], llm.generate([1], SamplingParams(max_tokens=3))
    assert failed.outputs[0].finish_reason == "error" and not served[0].error
    assert_all_free(llm)


def test_a_search_that_raises_frees_its_blocks(checkpoint, monkeypatch):
    llm = LLM(checkpoint, block_size=4)
    monkeypatch.setattr(llm.model_runner, "compute_logits", lambda batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.beam_search([PROMPTS[2]], BeamSearchParams(3, 10))
    assert_all_free(llm)


@pytest.mark.parametrize("options", [{"beam_width": 0}, {"beam_width": 2, "max_tokens": 0}, {"beam_width": 40}])
def test_an_impossible_search_is_a_value_error(checkpoint, options):
    with pytest.raises(ValueError):
        LLM(checkpoint, block_size=4).beam_search([PROMPTS[0]], BeamSearchParams(**options))
