"""Beam search, part by part, and compared with a plain one that caches nothing.

Of the model's 320 tokens, 20 are stop tokens of `ending`, and one of `checkpoint`.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from torch import Tensor

from ..beam_search import BeamSearch, BeamSearchParams, Candidate, Hypotheses, PoolTooSmall
from ..llm import LLM
from ..outputs import RequestOutput
from ..sampling import SamplingParams
from ..sequence import Sequence
from .helpers import CONFIG, make_sequence, next_logits, write_checkpoint

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
    assert not output.error, f"the search ended with an error: {output.error}"
    token_ids = [completion.token_ids for completion in output.outputs]
    assert token_ids == [beam.token_ids for beam in expected], "the beams are others, or in another order"
    logprobs = [completion.cumulative_logprob for completion in output.outputs]
    assert logprobs == pytest.approx([beam.logprob for beam in expected], rel=1e-4), "their log-probabilities differ"


def assert_all_free(llm: LLM) -> None:
    llm.kv_cache_manager.check_integrity()
    free, all_blocks = llm.kv_cache_manager.num_free_blocks, llm.kv_cache_manager.num_blocks
    assert free == all_blocks, "the search is over, and a beam still holds blocks"


def search_of(llm: LLM, width: int) -> BeamSearch:
    return BeamSearch(llm.llm_engine, BeamSearchParams(width))


# Slots


def beams_after(llm: LLM, prompt: list[int], token_ids: list[int]) -> list[Sequence]:
    """Return beams that share a computed prompt, and have one more token each, which is not computed yet."""
    [root] = llm.input_processor.process("0", prompt, SamplingParams(max_tokens=8))
    llm.kv_cache_manager.allocate(root)
    llm.model_runner.compute_logits([(root, len(prompt))])
    root.num_computed_tokens, beams = len(prompt), []
    for token_id in token_ids:
        beams.append(copy.copy(root))
        beams[-1].token_ids = [*prompt, token_id]
        llm.kv_cache_manager.fork(root, beams[-1])
    llm.kv_cache_manager.free(root)
    return beams


def test_each_beam_but_the_last_copies_a_block_that_they_share(checkpoint):
    """A prompt of 6 tokens ends in the middle of its second block. The last beam writes to it, the others to copies."""
    llm = LLM(checkpoint, block_size=4)
    beams = beams_after(llm, [1, 5, 9, 7, 8, 6], [10, 20, 30])
    search_of(llm, 3).append_slots(beams)
    tables = [beam.block_table for beam in beams]
    assert len({table[0] for table in tables}) == 1, f"all beams share the first block of the prompt: {tables}"
    assert len({table[1] for table in tables}) == 3, f"each beam writes to a second block of its own: {tables}"
    of_prompt = [
        llm.kv_cache.blocks[table[1], :, :, :2] for table in tables
    ]  # the slots of the prompt's last two tokens
    assert all(each.equal(of_prompt[-1]) for each in of_prompt), (
        "a copy does not have the keys and values of the prompt"
    )
    assert llm.kv_cache.num_blocks_copied == 2, "two of the three beams copy a block"
    llm.kv_cache_manager.check_integrity()


def test_beams_whose_tokens_begin_a_block_copy_nothing(checkpoint):
    llm = LLM(checkpoint, block_size=4)
    beams = beams_after(llm, [1, 5, 9, 7, 8, 6, 4, 3], [10, 20])
    search_of(llm, 2).append_slots(beams)
    tables = [beam.block_table for beam in beams]
    assert tables[0][:2] == tables[1][:2] and len({table[2] for table in tables}) == 2, f"the tables are {tables}"
    assert llm.kv_cache.num_blocks_copied == 0


def test_the_pool_is_too_small_if_a_beam_finds_no_free_block(checkpoint):
    """Of three blocks, two hold the prompt. Two beams need a copy of the second one."""
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=12)
    beams = beams_after(llm, [1, 5, 9, 7, 8, 6], [10, 20, 30])
    with pytest.raises(PoolTooSmall):
        search_of(llm, 3).append_slots(beams)


# Candidates


@pytest.mark.parametrize("budget", [2, 512])
def test_candidates_are_the_likeliest_continuations_of_all_beams(checkpoint, logprobs, budget):
    llm = LLM(checkpoint, block_size=4, max_num_batched_tokens=budget)
    beams = beams_after(llm, PROMPTS[1], [5, 200, 30])
    for beam, logprob in zip(beams, (-1.0, -1.2, -3.0), strict=True):
        beam.cumulative_logprob = logprob
    expected = [
        (beam.cumulative_logprob + logprob, number, token_id)
        for number, beam in enumerate(beams)
        for token_id, logprob in enumerate(logprobs(beam.token_ids).tolist())
    ]
    expected = sorted(expected, reverse=True)[:6]
    num_before = llm.model_runner.num_tokens
    candidates = search_of(llm, 3).extend(beams)[:6]
    found = [(beams.index(each.parent), each.token_id) for each in candidates]
    assert found == [(number, token_id) for _, number, token_id in expected], (
        "the best six, each as (number of the beam, token), by the logprob of the whole output"
    )
    assert [each.logprob for each in candidates] == pytest.approx([logprob for logprob, _, _ in expected], rel=1e-4)
    assert llm.model_runner.num_tokens - num_before == 3, "one token of each beam is computed"


@pytest.mark.parametrize("width", [1, 2])
def test_enough_candidates_go_on_even_if_the_likeliest_all_end(tmp_path, logprobs, width):
    """There are more stop tokens than twice the width, and they are the most likely first tokens."""
    endings = logprobs(PROMPTS[0]).topk(2 * width + 1).indices.tolist()
    llm = LLM(write_checkpoint(tmp_path, CONFIG | {"eos_token_id": endings}), block_size=4)
    [root] = llm.input_processor.process("0", PROMPTS[0], SamplingParams(max_tokens=8))
    llm.kv_cache_manager.allocate(root)
    candidates = search_of(llm, width).extend([root])
    assert sum(not each.has_ended for each in candidates) >= width, "too few candidates can go on"


# Hypotheses


def test_the_best_hypotheses_are_kept_best_first():
    """Four outputs have ended, with logprobs of -3, -1, -2 and -4. The search has two beams."""
    hypotheses = Hypotheses(BeamSearchParams(2, length_penalty=0.0))
    for token_id, logprob in enumerate((-3.0, -1.0, -2.0, -4.0)):
        hypotheses.add([token_id], logprob)
    assert [each.token_ids for each in hypotheses.best] == [[1], [2]]
    assert [each.logprob for each in hypotheses.best] == [-1.0, -2.0]


@pytest.mark.parametrize("length_penalty, best", [(0.0, [3]), (1.0, [4, 5, 6, 7]), (-1.0, [3])])
def test_a_length_penalty_above_0_favors_long_outputs(length_penalty, best):
    """An output of one token has a logprob of -1, and one of four has -3: -0.75 for each token."""
    hypotheses = Hypotheses(BeamSearchParams(2, length_penalty=length_penalty))
    hypotheses.add([3], -1.0)
    hypotheses.add([4, 5, 6, 7], -3.0)
    assert hypotheses.best[0].token_ids == best


@pytest.mark.parametrize(
    "early_stopping, length_penalty, logprob, is_final",
    [
        (True, 1.0, -0.1, True),
        (False, 1.0, -3.0, False),  # scores -1.5 now, and the worst hypothesis has -2
        (False, 1.0, -6.0, True),  # -3
        (False, 1.0, -4.0, True),  # -2
        ("never", 1.0, -6.0, False),  # -0.6, if it has 10 tokens
        ("never", 1.0, -30.0, True),  # -3
        ("never", 0.0, -3.0, False),  # the worst hypothesis has -4, and length has no influence
        ("never", 0.0, -6.0, True),
        ("never", -1.0, -3.0, False),  # -6 now, and less with each token; the worst hypothesis has -8
    ],
)
def test_a_search_is_final_once_the_likeliest_beam_has_no_hope(early_stopping, length_penalty, logprob, is_final):
    """Two hypotheses have two tokens, and logprobs of -2 and -4. The likeliest beam has two tokens, at most ten."""
    params = BeamSearchParams(2, length_penalty=length_penalty, early_stopping=early_stopping)
    hypotheses = Hypotheses(params)
    assert not hypotheses.are_final(logprob, 2, 10), "there is no hypothesis yet"
    hypotheses.add([3, 4], -2.0)
    assert not hypotheses.are_final(logprob, 2, 10), "there is only one hypothesis for two beams"
    hypotheses.add([5, 6], -4.0)
    assert hypotheses.are_final(logprob, 2, 10) == is_final


# Choice


def candidates_of(token_ids: list[int], max_tokens: int = 8) -> list[Candidate]:
    """Return a beam's candidates, best first. Tokens 1 and 2 end it."""
    parent = make_sequence("0", 3, max_tokens)
    parent.stop_token_ids = {1, 2}
    return [Candidate(parent, token_id, -float(rank)) for rank, token_id in enumerate(token_ids, start=1)]


def choose(folder: Path, candidates: list[Candidate], **options: bool) -> tuple[list[int], list[list[int]]]:
    """Return the tokens that two beams go on with, and the outputs that have ended."""
    params = BeamSearchParams(2, **options)
    hypotheses = Hypotheses(params)
    kept = BeamSearch(LLM(folder, block_size=4).llm_engine, params).choose(candidates, hypotheses)
    return [each.token_id for each in kept], [each.token_ids for each in hypotheses.best]


def test_the_likeliest_candidates_that_have_not_ended_go_on(checkpoint):
    """The second of these candidates has ended. It takes nobody's place."""
    assert choose(checkpoint, candidates_of([7, 1, 8, 9]))[0] == [7, 8]


def test_an_end_among_the_best_beam_width_becomes_a_hypothesis(checkpoint):
    """Two of these candidates have ended: the second one and the fourth."""
    assert choose(checkpoint, candidates_of([7, 1, 8, 2]))[1] == [[1]]


def test_no_beam_goes_on_once_the_hypotheses_are_final(checkpoint):
    """The best two candidates have ended, and early_stopping is True."""
    assert choose(checkpoint, candidates_of([1, 2, 7, 8]), early_stopping=True) == ([], [[1], [2]])


def test_no_beam_goes_on_at_the_most_tokens(checkpoint):
    """Each candidate ends with its first token."""
    assert choose(checkpoint, candidates_of([7, 8, 9], max_tokens=1)) == ([], [[7], [8]])


def test_the_first_beam_that_goes_on_is_compared_by_the_length_of_its_output(checkpoint, monkeypatch):
    """A prompt of 3 tokens, and at most 8 more. The first candidate ends, and the second one has a logprob of -2."""
    asked: list[tuple] = []
    monkeypatch.setattr(Hypotheses, "are_final", lambda *args, **options: asked.append((*args[1:], *options.values())))
    choose(checkpoint, candidates_of([1, 7, 8]))
    assert {*asked} == {(-2.0, 1, 8)}, "its logprob, its tokens without the prompt, and the most of an output"


# Forks, and whole searches


def test_a_fork_is_a_beam_of_its_own_and_leaves_its_parent_as_it_is(checkpoint):
    llm = LLM(checkpoint, block_size=4)
    [parent] = beams_after(llm, PROMPTS[1], [5])
    search = search_of(llm, 2)
    candidate = search.extend([parent])[0]
    child = search.fork(candidate)
    assert child.token_ids == [*PROMPTS[1], 5, candidate.token_id], "a child ends in the candidate's token"
    assert parent.token_ids == [*PROMPTS[1], 5], "the parent has no new token"
    assert (child.cumulative_logprob, parent.cumulative_logprob) == (candidate.logprob, 0.0), "a logprob of its own"
    assert child.block_table == parent.block_table and child.num_computed_tokens == 6, "the computed blocks are shared"
    llm.kv_cache_manager.check_integrity()


def test_a_step_leaves_its_parents_no_block_and_frees_none_that_a_child_shares(checkpoint, monkeypatch):
    """Two beams share the first block, and their children do, too."""
    llm = LLM(checkpoint, block_size=4)
    beams, manager = beams_after(llm, [1, 5, 9, 7, 8, 6], [10, 20]), llm.kv_cache_manager
    free = manager.free

    def watched(seq: Sequence) -> None:
        free(seq)
        assert manager.num_free_blocks < manager.num_blocks, "a block that a child shares was free for a moment"

    monkeypatch.setattr(manager, "free", watched)
    children = search_of(llm, 2).step(beams, Hypotheses(BeamSearchParams(2)))
    assert [len(child.token_ids) for child in children] == [8, 8], "two children, each with one token more"
    assert not any(beam.block_table for beam in beams), "a parent still holds blocks"
    manager.check_integrity()


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("width, length_penalty", [(3, 0.0), (3, 1.0), (3, -1.0), (1, 1.0)])
def test_beams_match_a_search_without_a_cache(ending, logprobs, width, length_penalty, early_stopping):
    """The plain search has no blocks, and sorts all continuations of all beams."""
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
