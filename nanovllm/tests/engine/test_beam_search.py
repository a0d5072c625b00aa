"""Beam search: the beams of a plain implementation that caches nothing, whatever the pool; and no block is left behind.

Of the 320 tokens of the model 20 end a text, so that beams end often.
"""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ...engine.beam_search import BeamSearch, BeamSearchParams, Candidate, Hypotheses
from ...engine.executor import Scheduled
from ...engine.outputs import RequestOutput
from ...engine.sequence import Sequence
from ...llama import LlamaForCausalLM
from ...llm import LLM
from ..helpers import model_runner
from .helpers import CONFIG, EOS, admit, greedy_without_cache, make_sequence, next_logits, write_checkpoint
from .scripted import assert_empty, params, run_to_the_end
from .test_interrupts import each_line, lines_run

pytestmark = pytest.mark.filterwarnings("ignore:.*requests were not served")
NUM_POSITIONS = 64
PROMPTS = [[1, 5, 9], [1, 300, 301, 302, 303], list(range(3, 15)), [1]]
ENDINGS = list(range(10, 320, 16))


class Beam(NamedTuple):
    token_ids: list[int]
    logprob: float


Logprobs = Callable[[list[int]], Tensor]


def plain_beam_search(
    logprobs: Logprobs, prompt: list[int], asked: BeamSearchParams, eos: list[int] = ENDINGS
) -> list[Beam]:
    """The best first."""
    return plain_search(logprobs, prompt, asked, eos)[0]


def plain_search(
    logprobs: Logprobs, prompt: list[int], asked: BeamSearchParams, eos: list[int]
) -> tuple[list[Beam], int]:
    """All continuations of all beams by a token, sorted; nothing is kept but the tokens. And the number of steps."""
    max_tokens = min(asked.max_tokens, NUM_POSITIONS - len(prompt))

    def score(beam: Beam, num_tokens: int) -> float:
        return beam.logprob / num_tokens**asked.length_penalty

    running, ended, num_steps = [Beam([], 0.0)], list[Beam](), 0
    while running:
        num_steps += 1
        longer = [
            Beam([*beam.token_ids, token_id], beam.logprob + logprob)
            for beam in running
            for token_id, logprob in enumerate(logprobs(prompt + beam.token_ids).tolist())
        ]
        longer.sort(key=lambda beam: -beam.logprob)
        at_end = [beam.token_ids[-1] in eos or len(beam.token_ids) == max_tokens for beam in longer]
        ended += [beam for beam, is_at_end in zip(longer[: asked.beam_width], at_end, strict=False) if is_at_end]
        ended = sorted(ended, key=lambda beam: -score(beam, len(beam.token_ids)))[: asked.beam_width]
        running = [beam for beam, is_at_end in zip(longer, at_end, strict=True) if not is_at_end][: asked.beam_width]
        if running and len(ended) == asked.beam_width:
            may_grow = asked.early_stopping == "never" and asked.length_penalty > 0
            hope = score(running[0], max_tokens if may_grow else len(running[0].token_ids))
            if asked.early_stopping is True or hope <= score(ended[-1], len(ended[-1].token_ids)):
                break
    return ended, num_steps


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory, tokenizer_model: bytes) -> Path:
    """The checkpoint, with 20 tokens that end a text."""
    config = CONFIG | {"eos_token_id": ENDINGS}
    return write_checkpoint(tmp_path_factory.mktemp("ending"), config, tokenizer_model=tokenizer_model)


@pytest.fixture(scope="module")
def logprobs(model: LlamaForCausalLM) -> Iterator[Logprobs]:
    """What the model says after some tokens, the whole text computed; kept, for many searches begin alike."""
    known: dict[tuple[int, ...], Tensor] = {}

    def compute(token_ids: list[int]) -> Tensor:
        key = tuple(token_ids)
        if key not in known:
            known[key] = next_logits(model, token_ids).log_softmax(dim=-1)
        return known[key]

    yield compute


def beams(output: RequestOutput) -> list[Beam]:
    assert output.error is None and output.finished
    assert [completion.index for completion in output.outputs] == list(range(len(output.outputs)))
    return [Beam(completion.token_ids, completion.cumulative_logprob) for completion in output.outputs]


def assert_same(output: RequestOutput, expected: list[Beam]) -> None:
    assert [beam.token_ids for beam in beams(output)] == [beam.token_ids for beam in expected]
    assert [beam.logprob for beam in beams(output)] == pytest.approx([beam.logprob for beam in expected], rel=1e-4)


def before_each_step(llm: LLM, do: Callable[[list[Scheduled]], object]) -> None:
    runner = model_runner(llm.llm_engine)
    compute = runner.compute
    runner.compute = lambda batch: (do(batch), compute(batch))[1]  # type: ignore[method-assign]


def assert_all_free(llm: LLM) -> None:
    assert_empty(llm.llm_engine)


# The beams of the plain implementation


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_beams_are_those_without_a_cache(ending, logprobs, width, length_penalty, early_stopping):
    asked = BeamSearchParams(width, 10, length_penalty=length_penalty, early_stopping=early_stopping)
    llm = LLM(ending, block_size=4, kv_cache_tokens=256)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, asked), strict=True):
        assert_same(output, plain_beam_search(logprobs, prompt, asked))
        assert output.prompt_token_ids == prompt and len(output.outputs) == width
        for completion in output.outputs:
            assert completion.finish_reason == ("stop" if completion.token_ids[-1] in ENDINGS else "length")
    assert_all_free(llm)


def test_the_cases_above_are_of_all_kinds(ending, logprobs):
    """Beams end with an end of text and with max_tokens; and each parameter changes what is found."""
    found = {}
    for length_penalty in (0.0, 1.0, 2.0, -1.0):
        for early_stopping in (False, True, "never"):
            asked = BeamSearchParams(3, 10, length_penalty=length_penalty, early_stopping=early_stopping)
            ended = [plain_beam_search(logprobs, prompt, asked) for prompt in PROMPTS]
            found[length_penalty, early_stopping] = [[beam.token_ids for beam in each] for each in ended]
    ends = [token_ids for each in found[1.0, False] for token_ids in each]
    assert any(ids[-1] in ENDINGS for ids in ends)
    assert any(len(ids) == 10 and ids[-1] not in ENDINGS for each in found[2.0, "never"] for ids in each)
    assert found[0.0, False] != found[1.0, False] != found[2.0, False] and found[-1.0, "never"] != found[1.0, "never"]
    assert found[1.0, True] != found[1.0, False] != found[1.0, "never"]


@pytest.mark.parametrize("width", [2, 5])
def test_beams_of_a_model_that_seldom_ends(checkpoint, logprobs, width):
    asked = BeamSearchParams(width, 20)
    for prompt, output in zip(PROMPTS, LLM(checkpoint, block_size=4).beam_search(PROMPTS, asked), strict=True):
        assert_same(output, plain_beam_search(logprobs, prompt, asked, eos=[EOS]))


@pytest.mark.parametrize("width", [1, 2])
def test_enough_go_on_though_all_of_the_likeliest_end(tmp_path, logprobs, width):
    """As many tokens end a text as are first looked at for each beam, and one more."""
    eos = logprobs(PROMPTS[0]).topk(2 * width + 1).indices.tolist()
    write_checkpoint(tmp_path, CONFIG | {"eos_token_id": eos})
    asked = BeamSearchParams(width, 6, length_penalty=2.0, early_stopping="never")
    expected, num_steps = plain_search(logprobs, PROMPTS[0], asked, eos)
    assert num_steps > 1, "some go on"
    assert_same(LLM(tmp_path).beam_search([PROMPTS[0]], asked)[0], expected)


def test_ignore_eos_goes_on_to_max_tokens(ending, logprobs):
    asked = BeamSearchParams(3, 8, ignore_eos=True)
    (output,) = LLM(ending, block_size=4).beam_search([PROMPTS[0]], asked)
    assert_same(output, plain_beam_search(logprobs, PROMPTS[0], asked, eos=[]))
    assert {completion.finish_reason for completion in output.outputs} == {"length"}


def test_a_beam_of_one_is_greedy(checkpoint, model):
    (output,) = LLM(checkpoint).beam_search([PROMPTS[0]], BeamSearchParams(1, 20, ignore_eos=True))
    assert beams(output)[0].token_ids == greedy_without_cache(model, PROMPTS[0], 20)


def test_one_token_each(ending, logprobs):
    asked = BeamSearchParams(4, max_tokens=1)
    (output,) = LLM(ending).beam_search([PROMPTS[0]], asked)
    assert_same(output, plain_beam_search(logprobs, PROMPTS[0], asked))
    assert [len(completion.token_ids) for completion in output.outputs] == [1] * 4


@pytest.mark.parametrize("num_prompt_tokens", [56, 60, 63])
def test_beams_end_at_max_model_len(ending, logprobs, num_prompt_tokens):
    prompt = [1 + i % 300 for i in range(num_prompt_tokens)]
    asked = BeamSearchParams(3, max_tokens=16, length_penalty=2.0, early_stopping="never")
    (output,) = LLM(ending, block_size=4).beam_search([prompt], asked)
    assert_same(output, plain_beam_search(logprobs, prompt, asked))
    assert max(len(completion.token_ids) for completion in output.outputs) == 64 - num_prompt_tokens


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("budget", [1, 2, 4, 5, 512])
def test_beams_do_not_depend_on_blocks_or_on_how_many_tokens_a_step_has(ending, logprobs, block_size, budget):
    """Budgets smaller than the width, and than the prompt of 12 tokens."""
    asked = BeamSearchParams(5, 10)
    llm = LLM(ending, block_size=block_size, kv_cache_tokens=192, max_num_batched_tokens=budget)
    sizes: list[int] = []
    before_each_step(llm, lambda batch: sizes.append(sum(num_tokens for _, num_tokens in batch)))
    (output,) = llm.beam_search([PROMPTS[2]], asked)
    assert_same(output, plain_beam_search(logprobs, PROMPTS[2], asked))
    assert max(sizes) == min(budget, 12), "no step is longer than its budget"
    assert_all_free(llm)


def test_a_text_is_searched_and_told_as_text(checkpoint, tokenizer):
    (output,) = LLM(checkpoint).beam_search("the fox", BeamSearchParams(3, 6, ignore_eos=True))
    assert output.prompt == "the fox" and output.prompt_token_ids == tokenizer.encode("the fox")
    whole = [tokenizer.decode(output.prompt_token_ids + beam.token_ids) for beam in beams(output)]
    before = tokenizer.decode(output.prompt_token_ids)
    assert [before + completion.text for completion in output.outputs] == whole


# What it takes


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -1.0])
def test_a_search_takes_no_step_more_than_it_must(ending, logprobs, length_penalty, early_stopping):
    asked = BeamSearchParams(3, 10, length_penalty=length_penalty, early_stopping=early_stopping)
    llm = LLM(ending, block_size=4)
    for prompt in PROMPTS:
        before = llm.llm_engine.executor.num_steps
        llm.beam_search([prompt], asked)
        assert llm.llm_engine.executor.num_steps - before == plain_search(logprobs, prompt, asked, ENDINGS)[1]


def test_the_prompt_is_computed_once_and_then_a_token_for_each_beam(checkpoint):
    llm = LLM(checkpoint, block_size=4)
    llm.beam_search([PROMPTS[2]], BeamSearchParams(4, 6, ignore_eos=True))
    assert llm.llm_engine.executor.num_tokens == 12 + 5 * 4 and llm.llm_engine.executor.num_steps == 6


def test_beams_hold_what_they_share_once(checkpoint):
    """A prompt of 40 tokens is 10 blocks; 4 beams of 6 tokens more have at most 2 of their own."""
    llm = LLM(checkpoint, block_size=4)
    llm.beam_search([[1 + i for i in range(40)]], BeamSearchParams(4, 7, ignore_eos=True))
    assert 10 * 4 + 6 <= llm.peak.held <= (10 + 4 * 2) * 4
    assert llm.peak.pieces[:10] == tuple((start, 4, 4) for start in range(0, 40, 4)), "each once"


def test_a_dropped_beam_gives_its_blocks_back_at_once(ending):
    """In each step the pool holds the blocks of the beams that it computes, and nothing else."""
    llm = LLM(ending, block_size=2, kv_cache_tokens=256)
    held = []

    def watch(batch):
        manager = llm.llm_engine.kv_cache_manager
        manager.check_integrity()
        named = {block for seq, _ in batch for block in seq.block_table}
        held.append((len(manager._holders), manager.report().held - 2 * len(named)))

    before_each_step(llm, watch)
    llm.beam_search(PROMPTS, BeamSearchParams(3, 10))
    assert set(held) == {(1, 0), (3, 0)}
    assert llm.llm_engine.kv_cache.num_blocks_copied > 0


def test_a_pool_that_just_holds_the_beams_is_enough(checkpoint, logprobs):
    """3 tokens and 9 more, of which the last needs no slot: with blocks of one slot, at most 3 + 8 * 2 + 2 of them."""
    asked = BeamSearchParams(2, 9, ignore_eos=True)
    llm = LLM(checkpoint, block_size=1, kv_cache_tokens=21)
    assert_same(llm.beam_search([PROMPTS[0]], asked)[0], plain_beam_search(logprobs, PROMPTS[0], asked, eos=[]))


# Nothing is left


@pytest.mark.parametrize("num_blocks", range(1, 9))
def test_a_pool_that_is_too_small_is_an_error_and_nothing_is_left(checkpoint, num_blocks):
    """3 beams of 12 and up to 10 tokens; the second prompt, of one token and two more, fits in one block or three."""
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=num_blocks * 4)
    for _ in range(2):
        output = llm.beam_search([PROMPTS[2]], BeamSearchParams(3, 10, ignore_eos=True))[0]
        assert output.outputs[0].finish_reason == "error" and "blocks are needed" in output.error
        assert_all_free(llm)
    (output,) = llm.generate([[1]], params(3))
    assert output.error is None and len(output.outputs[0].token_ids) == 3


def test_after_one_that_found_no_room_the_next_is_served(checkpoint, logprobs):
    asked = BeamSearchParams(2, 4, ignore_eos=True)
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=12)
    outputs = llm.beam_search([PROMPTS[2], PROMPTS[0], PROMPTS[2]], asked)
    assert [output.error is None for output in outputs] == [False, True, False]
    assert_same(outputs[1], plain_beam_search(logprobs, PROMPTS[0], asked, eos=[]))


def raises_in_step(llm: LLM, number: int, error: BaseException) -> None:
    """In the computing of that step."""
    numbers = iter(range(100))

    def fail(_: list[Scheduled]) -> None:
        if next(numbers) == number:
            raise error

    before_each_step(llm, fail)


@pytest.mark.parametrize("number", range(7))
def test_a_poisoned_model_is_an_error_of_its_request_and_nothing_is_left(checkpoint, logprobs, number):
    """Of 3 chunks and 9 steps more. The next prompt is served."""
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=256, max_num_batched_tokens=5)
    raises_in_step(llm, number, RuntimeError("out of memory"))
    asked = BeamSearchParams(3, 10, ignore_eos=True)
    failed, served = llm.beam_search([PROMPTS[2], PROMPTS[0]], asked)
    assert failed.outputs[0].finish_reason == "error" and "out of memory" in failed.error
    assert_same(served, plain_beam_search(logprobs, PROMPTS[0], asked, eos=[]))
    assert_all_free(llm)


@pytest.mark.parametrize("number", range(7))
def test_ctrl_c_ends_the_call_between_two_steps_and_nothing_is_left(checkpoint, number):
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=256, max_num_batched_tokens=5)
    numbers = iter(range(100))
    before_each_step(llm, lambda _: signal.raise_signal(signal.SIGINT) if next(numbers) == number else None)
    with pytest.raises(KeyboardInterrupt):
        llm.beam_search([PROMPTS[2]], BeamSearchParams(3, 10, ignore_eos=True))
    assert next(numbers) == number + 1, "no step was begun after it"
    assert_all_free(llm)


def test_a_second_ctrl_c_leaves_nothing_either(checkpoint, monkeypatch):
    """The first ends the search, the second comes while its blocks are given back."""
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=256, max_num_batched_tokens=5)
    free, presses = llm.llm_engine.kv_cache_manager.free, list[object]()

    def press(of: object) -> None:
        presses.append(of)
        signal.raise_signal(signal.SIGINT)

    def pressed(seq: Sequence) -> None:
        press(seq)
        free(seq)

    before_each_step(llm, press)
    monkeypatch.setattr(llm.llm_engine.kv_cache_manager, "free", pressed)
    with pytest.raises(KeyboardInterrupt):
        llm.beam_search([PROMPTS[2]], BeamSearchParams(3, 10, ignore_eos=True))
    assert len(presses) == 2
    assert_all_free(llm)


def test_an_error_that_nobody_foresaw_ends_the_call_and_nothing_is_left(checkpoint):
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=256)
    raises_in_step(llm, 1, TypeError("a mistake"))
    with pytest.raises(TypeError, match="a mistake"):
        llm.beam_search([PROMPTS[2]], BeamSearchParams(3, 10, ignore_eos=True))
    assert_all_free(llm)


def test_a_search_takes_up_what_was_compiled_meanwhile(checkpoint, monkeypatch):
    llm, calls = LLM(checkpoint, block_size=4, kv_cache_tokens=256), []
    monkeypatch.setattr(llm.llm_engine.kernels, "switch_when_ready", lambda: calls.append("take up"))
    llm.beam_search([PROMPTS[0]], BeamSearchParams(2, 2))
    assert calls == ["take up"]


def test_before_whatever_line_of_a_search_ctrl_c_is_pressed_nothing_is_left(checkpoint):
    def search(llm: LLM) -> None:
        llm.beam_search([PROMPTS[0], []], BeamSearchParams(2, 3))  # the second is refused

    def new() -> LLM:
        return LLM(checkpoint, block_size=2, kv_cache_tokens=64)

    for place in each_line(search, new()):
        if not place[0].endswith("beam_search.py"):
            continue  # other tests press there
        llm = new()
        with pytest.raises(KeyboardInterrupt):
            lines_run(search, llm, press_at=place)
        assert_all_free(llm)


def test_an_output_tells_when_its_request_came_and_ended(checkpoint):
    before = time.perf_counter()
    (output,) = LLM(checkpoint).beam_search([PROMPTS[0]], BeamSearchParams(2, 4))
    arrival, end = output.metrics.arrival_time, output.metrics.finished_time
    assert before < arrival < output.metrics.first_token_time <= end <= time.perf_counter()


def test_requests_are_served_before_and_after_and_get_other_ids(checkpoint):
    llm = LLM(checkpoint, block_size=4)
    first = llm.generate([PROMPTS[0]], params(5))
    searched = llm.beam_search(PROMPTS[:2], BeamSearchParams(2, 4))
    second = llm.generate([PROMPTS[0]], params(5))
    assert first[0].outputs == second[0].outputs
    assert len({output.request_id for output in [*first, *searched, *second]}) == 4


# Errors


@pytest.mark.parametrize(
    "options, error",
    [
        ({"beam_width": 0}, "beam_width must be a whole number, at least 1, not 0"),
        ({"beam_width": -3}, "beam_width must be a whole number, at least 1, not -3"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens must be a whole number, at least 1, not 0"),
        ({"beam_width": True}, "beam_width must be a whole number, at least 1, not True"),
        ({"beam_width": None}, "beam_width must be a whole number, at least 1, not None"),
        ({"beam_width": 2, "max_tokens": 1.5}, "max_tokens must be a whole number, at least 1, not 1.5"),
        ({"beam_width": 2, "ignore_eos": "no"}, "ignore_eos must be True or False, not 'no'"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty must be a number, not nan"),
        ({"beam_width": 2, "length_penalty": "1"}, "length_penalty must be a number, not '1'"),
        ({"beam_width": 2, "early_stopping": "soon"}, "early_stopping must be True, False or \"never\", not 'soon'"),
        ({"beam_width": 2, "early_stopping": None}, 'early_stopping must be True, False or "never", not None'),
        ({"beam_width": 2, "early_stopping": 1}, 'early_stopping must be True, False or "never", not 1'),
    ],
    ids=str,
)
def test_parameters_that_cannot_be_are_named_with_their_value(options, error):
    with pytest.raises(ValueError, match=error):
        BeamSearchParams(**options)


@pytest.mark.parametrize(
    "prompt, error",
    [
        ([], "the prompt is empty"),
        ([320], "token id 320 is not an int from 0 to 319"),
        ([1] * 64, "the prompt has 64 tokens; max_model_len 64 leaves room for 63"),
        ("text", "there is no tokenizer: a prompt must be a list of token ids"),
    ],
    ids=str,
)
def test_a_prompt_that_cannot_be_served_is_an_error_in_its_place(tmp_path, logprobs, prompt, error):
    llm, asked = LLM(write_checkpoint(tmp_path / "bare"), block_size=4), BeamSearchParams(2, 4)
    outputs = llm.beam_search([PROMPTS[0], prompt, PROMPTS[1]], asked)
    assert error in outputs[1].error and outputs[1].outputs[0].finish_reason == "error"
    for i, served in ((0, 0), (2, 1)):
        assert_same(outputs[i], plain_beam_search(logprobs, PROMPTS[served], asked, eos=[EOS]))
    assert_all_free(llm)


def test_more_beams_than_may_run_are_refused_with_both_numbers(checkpoint):
    llm = LLM(checkpoint, max_num_seqs=3)
    with pytest.raises(ValueError, match="beam_width is 4, max_num_seqs is 3"):
        llm.beam_search([PROMPTS[0]], BeamSearchParams(4))
    assert len(llm.beam_search([PROMPTS[0]], BeamSearchParams(3))[0].outputs) == 3


def test_who_is_being_served_is_not_disturbed(checkpoint):
    llm = LLM(checkpoint, block_size=4)
    llm.llm_engine.add_request("a", PROMPTS[0], params(5))
    for _ in range(2):
        with pytest.raises(ValueError, match="it has unfinished requests"):
            llm.beam_search([PROMPTS[0]], BeamSearchParams(2))
        llm.llm_engine.step()
    run_to_the_end(llm.llm_engine)
    assert llm.beam_search([PROMPTS[0]], BeamSearchParams(2))[0].error is None


# Its parts


def beam_of(logprob: float, num_tokens: int = 2, max_num_tokens: int = 9):
    beam = make_sequence("a", num_tokens, max_tokens=max_num_tokens - num_tokens)
    beam.cumulative_logprob, beam.stop_token_ids = logprob, {EOS}
    return beam


def test_the_likeliest_of_all_continuations_of_all_beams(checkpoint, monkeypatch):
    """-1 - 0.5, -1 - 3, -2 - 0.25 and -2 - 1, all else is less likely: the first, third, fourth, second."""
    search = BeamSearch(LLM(checkpoint, block_size=4).llm_engine, BeamSearchParams(2))
    beams, logprobs = [beam_of(-1.0), beam_of(-2.0)], torch.full((2, 320), -9.0)
    for beam in beams:
        admit(search._kv_cache_manager, beam)
    logprobs[0, 5], logprobs[0, 6], logprobs[1, 7], logprobs[1, 5] = -0.5, -3.0, -0.25, -1.0
    monkeypatch.setattr(search, "_compute", lambda beams: logprobs)
    (first, second), found = beams, search._most_likely(beams)
    assert [candidate[:3] for candidate in found] == [
        (first, 5, -1.5),
        (second, 7, -2.25),
        (second, 5, -3.0),
        (first, 6, -4.0),
    ]


def test_a_candidate_has_ended_with_a_stop_token_or_the_last_that_there_is_room_for():
    assert [Candidate(beam_of(-1.0), token_id, -1.5).has_ended for token_id in (EOS, 5)] == [True, False]
    assert [Candidate(beam_of(-1.0, length), 5, -1.5).has_ended for length in (7, 8)] == [False, True]


@pytest.mark.parametrize("logprob, goes_on", [(-6.9, True), (-7.1, False), (-8.9, False)])
def test_what_a_beam_may_become_is_counted_without_its_prompt(checkpoint, logprob, goes_on):
    """2 of at most 9 tokens are the prompt: -6.9 / 7 would be better than -1, and -8.9 / 9 is not what counts."""
    asked = BeamSearchParams(1, length_penalty=1.0, early_stopping="never")
    hypotheses = Hypotheses(asked)
    hypotheses.add([5], -1.0)
    candidate = Candidate(beam_of(-1.0), 5, logprob)
    kept = BeamSearch(LLM(checkpoint).llm_engine, asked)._choose([candidate], hypotheses)
    assert kept == ([candidate] if goes_on else [])


def test_hypotheses_keep_the_best_by_logprob_over_length_to_the_power_of_the_penalty():
    """Of -2 / 1, -3 / 2 and -4 / 4 the last two are the best; without a penalty the first two."""
    for length_penalty, lengths in ((1.0, [4, 2]), (0.0, [1, 2]), (-1.0, [1, 2])):
        hypotheses = Hypotheses(BeamSearchParams(2, length_penalty=length_penalty))
        for logprob, length in ((-2.0, 1), (-3.0, 2), (-4.0, 4)):
            hypotheses.add([5] * length, logprob)
        assert [len(hypothesis.token_ids) for hypothesis in hypotheses.best] == lengths


@pytest.mark.parametrize(
    "early_stopping, length_penalty, are_final",
    [
        (True, 1.0, True),  # enough have ended
        (False, 1.0, True),  # -6 / 2 is no better than the worst, -3
        ("never", 1.0, False),  # -6 / 10 would be
        ("never", -1.0, True),  # longer is worse: -6 * 2 against -3 * 1
        (False, 0.0, True),  # -6 against -3
    ],
)
def test_a_search_is_over_when_no_beam_can_become_better_than_the_worst_that_counts(
    early_stopping, length_penalty, are_final
):
    hypotheses = Hypotheses(BeamSearchParams(2, length_penalty=length_penalty, early_stopping=early_stopping))
    hypotheses.add([5], -1.0)
    assert not hypotheses.are_final(-6.0, num_tokens=2, max_tokens=10), "only one of two has ended"
    hypotheses.add([6], -3.0)
    assert hypotheses.are_final(-6.0, num_tokens=2, max_tokens=10) == are_final
    assert hypotheses.are_final(-1.0, num_tokens=2, max_tokens=10) == (early_stopping is True)


def test_a_search_finds_what_an_equal_one_has_computed(checkpoint):
    """All full blocks of the prompt and of the beams are cached."""
    llm = LLM(checkpoint, block_size=4)
    search = BeamSearchParams(3, 9, ignore_eos=True)
    first = llm.beam_search([PROMPTS[2]], search)
    assert llm.llm_engine.kv_cache_manager.prefix_cache_stats.hits == 0
    second = llm.beam_search([PROMPTS[2]], search)
    assert llm.llm_engine.kv_cache_manager.prefix_cache_stats.hits == 8, "two blocks of a prompt of 12 tokens"
    assert_same(second[0], beams(first[0]))
    best = first[0].outputs[0].token_ids
    llm.generate([[*PROMPTS[2], *best]], params(1))
    assert llm.llm_engine.kv_cache_manager.prefix_cache_stats.hits == 8 + 20, "and what the best beam has said"
