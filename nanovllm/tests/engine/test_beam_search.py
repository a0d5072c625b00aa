"""Beam search finds the same beams as a plain implementation without a cache, whatever the pool, and leaks no block.

20 of the model's 320 tokens end a text, so beams end often.
"""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from torch import Tensor

from ...beam_search import BeamSearchParams
from ...engine.executor import Scheduled
from ...llama import LlamaForCausalLM
from ...llm import LLM
from ...requests.outputs import RequestOutput
from ..testing.checkpoints import CONFIG, EOS, write_checkpoint
from ..testing.engines import assert_empty, model_runner, params, run_to_the_end
from ..testing.reference import greedy_without_cache, next_logits
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
    logprobs: Logprobs, prompt: list[int], search_params: BeamSearchParams, eos: list[int] = ENDINGS
) -> list[Beam]:
    """Return the hypotheses, best first."""
    return plain_search(logprobs, prompt, search_params, eos)[0]


def plain_search(
    logprobs: Logprobs, prompt: list[int], search_params: BeamSearchParams, eos: list[int]
) -> tuple[list[Beam], int]:
    """Return the hypotheses, best first, and the number of steps. Keep only tokens.

    Of a beam's continuations by one token, those after the likeliest beam_width + len(eos) can neither end nor go on.
    """
    max_tokens = min(search_params.max_tokens, NUM_POSITIONS - len(prompt))
    num_considered = search_params.beam_width + len(eos)

    def score(beam: Beam, num_tokens: int) -> float:
        return beam.logprob / num_tokens**search_params.length_penalty

    running, ended, num_steps = [Beam([], 0.0)], list[Beam](), 0
    while running:
        num_steps += 1
        longer = [
            Beam([*beam.token_ids, token_id], beam.logprob + logprob)
            for beam in running
            for logprob, token_id in likeliest(logprobs(prompt + beam.token_ids), num_considered)
        ]
        longer.sort(key=lambda beam: -beam.logprob)
        at_end = [beam.token_ids[-1] in eos or len(beam.token_ids) == max_tokens for beam in longer]
        ended += [
            beam for beam, is_at_end in zip(longer[: search_params.beam_width], at_end, strict=False) if is_at_end
        ]
        ended = sorted(ended, key=lambda beam: -score(beam, len(beam.token_ids)))[: search_params.beam_width]
        running = [beam for beam, is_at_end in zip(longer, at_end, strict=True) if not is_at_end][
            : search_params.beam_width
        ]
        if running and len(ended) == search_params.beam_width:
            may_grow = search_params.early_stopping == "never" and search_params.length_penalty > 0
            hope = score(running[0], max_tokens if may_grow else len(running[0].token_ids))
            if search_params.early_stopping is True or hope <= score(ended[-1], len(ended[-1].token_ids)):
                break
    return ended, num_steps


def likeliest(logprobs: Tensor, num_tokens: int) -> Iterator[tuple[float, int]]:
    """Yield the logprob and the id of the likeliest tokens."""
    values, token_ids = logprobs.topk(num_tokens)
    return zip(values.tolist(), token_ids.tolist(), strict=True)


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory, tokenizer_model: bytes) -> Path:
    """Return the checkpoint with 20 tokens that end a text."""
    config = CONFIG | {"eos_token_id": ENDINGS}
    return write_checkpoint(tmp_path_factory.mktemp("ending"), config, tokenizer_model=tokenizer_model)


@pytest.fixture(scope="module")
def logprobs(model: LlamaForCausalLM) -> Iterator[Logprobs]:
    """Return the logprobs after some tokens, computed from scratch. Keep them, since many searches start alike."""
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


PENALTIES_AND_STOPS = [(penalty, stop) for penalty in (0.0, 1.0, 2.0, -1.0) for stop in (False, True, "never")]


@pytest.mark.parametrize(
    ("width", "length_penalty", "early_stopping"),
    [
        *((3, *each) for each in PENALTIES_AND_STOPS),
        *((1, *each) for each in PENALTIES_AND_STOPS[1::5]),
        *((2, *each) for each in PENALTIES_AND_STOPS[::3]),
        *((5, *each) for each in PENALTIES_AND_STOPS[2::5]),
    ],
)
def test_beams_match_a_search_without_a_cache(ending, logprobs, width, length_penalty, early_stopping):
    search_params = BeamSearchParams(width, 10, length_penalty=length_penalty, early_stopping=early_stopping)
    llm = LLM(ending, block_size=4, kv_cache_tokens=256)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, search_params), strict=True):
        assert_same(output, plain_beam_search(logprobs, prompt, search_params))
        assert output.prompt_token_ids == prompt and len(output.outputs) == width
        for completion in output.outputs:
            assert completion.finish_reason == ("stop" if completion.token_ids[-1] in ENDINGS else "length")
    assert_all_free(llm)


def test_the_cases_above_cover_every_way_to_end(ending, logprobs):
    """Beams end with a stop token and with max_tokens, and each parameter changes the result."""
    result = {}
    for length_penalty, early_stopping in PENALTIES_AND_STOPS:
        search_params = BeamSearchParams(3, 10, length_penalty=length_penalty, early_stopping=early_stopping)
        ended = [plain_beam_search(logprobs, prompt, search_params) for prompt in PROMPTS]
        result[length_penalty, early_stopping] = [[beam.token_ids for beam in each] for each in ended]
    ends = [token_ids for each in result[1.0, False] for token_ids in each]
    assert any(ids[-1] in ENDINGS for ids in ends)
    assert any(len(ids) == 10 and ids[-1] not in ENDINGS for each in result[2.0, "never"] for ids in each)
    assert (
        result[0.0, False] != result[1.0, False] != result[2.0, False] and result[-1.0, "never"] != result[1.0, "never"]
    )
    assert result[1.0, True] != result[1.0, False] != result[1.0, "never"]


@pytest.mark.parametrize("width", [1, 2])
def test_enough_beams_continue_when_the_likeliest_tokens_all_end(tmp_path, logprobs, width):
    """One more token ends a text than are considered for each beam at first."""
    eos = logprobs(PROMPTS[0]).topk(2 * width + 1).indices.tolist()
    write_checkpoint(tmp_path, CONFIG | {"eos_token_id": eos})
    search_params = BeamSearchParams(width, 6, length_penalty=2.0, early_stopping="never")
    expected, num_steps = plain_search(logprobs, PROMPTS[0], search_params, eos)
    assert num_steps > 1, "some beams continue"
    assert_same(LLM(tmp_path).beam_search([PROMPTS[0]], search_params)[0], expected)


def test_ignore_eos_continues_to_max_tokens(ending, logprobs):
    search_params = BeamSearchParams(3, 8, ignore_eos=True)
    (output,) = LLM(ending, block_size=4).beam_search([PROMPTS[0]], search_params)
    assert_same(output, plain_beam_search(logprobs, PROMPTS[0], search_params, eos=[]))
    assert {completion.finish_reason for completion in output.outputs} == {"length"}


def test_one_beam_is_greedy_search(checkpoint, model):
    (output,) = LLM(checkpoint).beam_search([PROMPTS[0]], BeamSearchParams(1, 20, ignore_eos=True))
    assert beams(output)[0].token_ids == greedy_without_cache(model, PROMPTS[0], 20)


@pytest.mark.parametrize("num_prompt_tokens", [56, 60, 63])
def test_beams_end_at_max_model_len(ending, logprobs, num_prompt_tokens):
    prompt = [1 + i % 300 for i in range(num_prompt_tokens)]
    search_params = BeamSearchParams(3, max_tokens=16, length_penalty=2.0, early_stopping="never")
    (output,) = LLM(ending, block_size=4).beam_search([prompt], search_params)
    assert_same(output, plain_beam_search(logprobs, prompt, search_params))
    assert max(len(completion.token_ids) for completion in output.outputs) == 64 - num_prompt_tokens


@pytest.mark.parametrize(("block_size", "budget"), [(1, 4), (1, 512), (3, 1), (3, 5), (16, 2), (16, 512)])
def test_beams_do_not_depend_on_block_size_or_token_budget(ending, logprobs, block_size, budget):
    """The budgets are smaller than the beam width and than the prompt of 12 tokens."""
    search_params = BeamSearchParams(5, 10)
    llm = LLM(ending, block_size=block_size, kv_cache_tokens=192, max_num_batched_tokens=budget)
    sizes: list[int] = []
    before_each_step(llm, lambda batch: sizes.append(sum(num_tokens for _, num_tokens in batch)))
    (output,) = llm.beam_search([PROMPTS[2]], search_params)
    assert_same(output, plain_beam_search(logprobs, PROMPTS[2], search_params))
    assert max(sizes) == min(budget, 12), "no step exceeds its budget"
    assert_all_free(llm)


def test_text_prompt_returns_text(checkpoint, tokenizer):
    (output,) = LLM(checkpoint).beam_search("the fox", BeamSearchParams(3, 6, ignore_eos=True))
    assert output.prompt == "the fox" and output.prompt_token_ids == tokenizer.encode("the fox")
    whole = [tokenizer.decode(output.prompt_token_ids + beam.token_ids) for beam in beams(output)]
    before = tokenizer.decode(output.prompt_token_ids)
    assert [before + completion.text for completion in output.outputs] == whole


# Cost


def test_prompt_is_computed_once_then_one_token_per_beam(checkpoint):
    llm = LLM(checkpoint, block_size=4)
    llm.beam_search([PROMPTS[2]], BeamSearchParams(4, 6, ignore_eos=True))
    assert llm.llm_engine.executor.num_tokens == 12 + 5 * 4 and llm.llm_engine.executor.num_steps == 6


def test_pool_that_just_fits_the_beams_is_enough(checkpoint, logprobs):
    """3 tokens and 9 more, the last of which needs no slot. With one slot per block, that is at most 3 + 8 * 2 + 2."""
    search_params = BeamSearchParams(2, 9, ignore_eos=True)
    llm = LLM(checkpoint, block_size=1, kv_cache_tokens=21)
    assert_same(
        llm.beam_search([PROMPTS[0]], search_params)[0], plain_beam_search(logprobs, PROMPTS[0], search_params, eos=[])
    )


# Cleanup


@pytest.mark.parametrize("num_blocks", [1, 3, 4, 8])
def test_too_small_pool_is_an_error_that_leaks_nothing(checkpoint, num_blocks):
    """3 beams of 12 and up to 10 tokens do not fit; the second prompt, of one token and two more, does."""
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=num_blocks * 4)
    for _ in range(2):
        output = llm.beam_search([PROMPTS[2]], BeamSearchParams(3, 10, ignore_eos=True))[0]
        assert output.outputs[0].finish_reason == "error" and "blocks are needed" in output.error
        assert_all_free(llm)
    (output,) = llm.generate([[1]], params(3))
    assert output.error is None and len(output.outputs[0].token_ids) == 3


def raises_in_step(llm: LLM, number: int, error: BaseException) -> None:
    """Raise while that step is computed."""
    numbers = iter(range(100))

    def fail(_: list[Scheduled]) -> None:
        if next(numbers) == number:
            raise error

    before_each_step(llm, fail)


@pytest.mark.parametrize("number", [0, 2, 3, 6])
def test_failing_model_is_an_error_of_its_request_and_leaks_nothing(checkpoint, logprobs, number):
    """Fail in each of 3 chunks and 9 steps. The next prompt is served."""
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=256, max_num_batched_tokens=5)
    raises_in_step(llm, number, RuntimeError("out of memory"))
    search_params = BeamSearchParams(3, 10, ignore_eos=True)
    failed, served = llm.beam_search([PROMPTS[2], PROMPTS[0]], search_params)
    assert failed.outputs[0].finish_reason == "error" and "out of memory" in failed.error
    assert_same(served, plain_beam_search(logprobs, PROMPTS[0], search_params, eos=[]))
    assert_all_free(llm)


@pytest.mark.parametrize("number", [0, 2, 3, 6])
def test_ctrl_c_ends_the_call_between_two_steps_and_leaks_nothing(checkpoint, number):
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=256, max_num_batched_tokens=5)
    numbers = iter(range(100))
    before_each_step(llm, lambda _: signal.raise_signal(signal.SIGINT) if next(numbers) == number else None)
    with pytest.raises(KeyboardInterrupt):
        llm.beam_search([PROMPTS[2]], BeamSearchParams(3, 10, ignore_eos=True))
    assert next(numbers) == number + 1, "no further step began"
    assert_all_free(llm)


def test_unexpected_error_ends_the_call_and_leaks_nothing(checkpoint):
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=256)
    raises_in_step(llm, 1, TypeError("a mistake"))
    with pytest.raises(TypeError, match="a mistake"):
        llm.beam_search([PROMPTS[2]], BeamSearchParams(3, 10, ignore_eos=True))
    assert_all_free(llm)


def test_search_switches_to_kernels_that_were_compiled_meanwhile(checkpoint, monkeypatch):
    llm, calls = LLM(checkpoint, block_size=4, kv_cache_tokens=256), []
    monkeypatch.setattr(llm.llm_engine.kernels, "switch_when_ready", lambda: calls.append("take up"))
    llm.beam_search([PROMPTS[0]], BeamSearchParams(2, 2))
    assert calls == ["take up"]


@pytest.mark.full
def test_ctrl_c_before_any_line_of_a_search_leaks_nothing(checkpoint):
    def search(llm: LLM) -> None:
        llm.beam_search([PROMPTS[0], []], BeamSearchParams(2, 3))  # the second prompt is refused

    def new() -> LLM:
        return LLM(checkpoint, block_size=2, kv_cache_tokens=64)

    places = [place for place in each_line(search, new()) if place[0].endswith("beam_search.py")]
    for place in places[::3]:  # other tests press Ctrl-C in the lines of other files
        llm = new()
        with pytest.raises(KeyboardInterrupt):
            lines_run(search, llm, press_at=place)
        assert_all_free(llm)


def test_requests_before_and_after_a_search_are_served_under_new_ids(checkpoint):
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
        ({"beam_width": 0}, "beam_width must be at least 1, got 0"),
        ({"beam_width": -3}, "beam_width must be at least 1, got -3"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"beam_width": 2, "length_penalty": 17}, "length_penalty must be from -16 to 16, got 17"),
        ({"beam_width": 2, "length_penalty": -1e5}, "length_penalty must be from -16 to 16, got -100000.0"),
        ({"beam_width": True}, "beam_width must be an integer, got True"),
        ({"beam_width": None}, "beam_width must be an integer, got None"),
        ({"beam_width": 2, "max_tokens": 1.5}, "max_tokens must be an integer, got 1.5"),
        ({"beam_width": 2, "ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty must be a finite number, got nan"),
        ({"beam_width": 2, "length_penalty": "1"}, "length_penalty must be a finite number, got '1'"),
        ({"beam_width": 2, "early_stopping": "soon"}, "early_stopping must be True, False or \"never\", got 'soon'"),
        ({"beam_width": 2, "early_stopping": None}, "early_stopping must be True or False or a string, got None"),
        ({"beam_width": 2, "early_stopping": 1}, "early_stopping must be True or False or a string, got 1"),
    ],
    ids=str,
)
def test_invalid_parameter_is_named_with_its_value(options, error):
    with pytest.raises(ValueError, match=error):
        BeamSearchParams(**options)


def test_length_penalty_at_its_limits_is_accepted():
    assert [BeamSearchParams(2, length_penalty=limit).length_penalty for limit in (-16, 16)] == [-16, 16]


@pytest.mark.parametrize(
    "prompt, error",
    [
        ([], "the prompt is empty"),
        ([320], "from 0 to 319, got 320"),
        ([1] * 64, "at most 63 tokens, since max_model_len is 64, got 64"),
        ("text", "the checkpoint has no tokenizer"),
    ],
    ids=str,
)
def test_prompt_that_cannot_be_served_is_an_error_in_its_place(tmp_path, logprobs, prompt, error):
    bare, search_params = write_checkpoint(tmp_path / "bare", tokenizer_model=b""), BeamSearchParams(2, 4)
    llm = LLM(bare, block_size=4)
    outputs = llm.beam_search([PROMPTS[0], prompt, PROMPTS[1]], search_params)
    assert error in outputs[1].error and outputs[1].outputs[0].finish_reason == "error"
    for i, served in ((0, 0), (2, 1)):
        assert_same(outputs[i], plain_beam_search(logprobs, PROMPTS[served], search_params, eos=[EOS]))
    assert_all_free(llm)


def test_more_beams_than_max_num_seqs_are_refused(checkpoint):
    llm = LLM(checkpoint, max_num_seqs=3)
    with pytest.raises(ValueError, match=r"beam_width must be at most max_num_seqs \(3\), got 4"):
        llm.beam_search([PROMPTS[0]], BeamSearchParams(4))
    assert len(llm.beam_search([PROMPTS[0]], BeamSearchParams(3))[0].outputs) == 3


def test_params_of_another_kind_are_refused(checkpoint):
    with pytest.raises(ValueError, match="params must be BeamSearchParams, got SamplingParams"):
        LLM(checkpoint).beam_search([PROMPTS[0]], params(4))


def test_search_does_not_disturb_unfinished_requests(checkpoint):
    llm = LLM(checkpoint, block_size=4)
    llm.llm_engine.add_request("a", PROMPTS[0], params(5))
    for _ in range(2):
        with pytest.raises(ValueError, match="unfinished requests"):
            llm.beam_search([PROMPTS[0]], BeamSearchParams(2))
        llm.llm_engine.step()
    run_to_the_end(llm.llm_engine)
    assert llm.beam_search([PROMPTS[0]], BeamSearchParams(2))[0].error is None


# The parts of a search


def test_search_reuses_the_cache_of_an_equal_one(checkpoint):
    """All full blocks of the prompt and of the beams are cached."""
    llm = LLM(checkpoint, block_size=4)
    search = BeamSearchParams(3, 9, ignore_eos=True)
    first = llm.beam_search([PROMPTS[2]], search)
    assert llm.llm_engine.kv_cache_manager.prefix_cache_stats.hits == 0
    second = llm.beam_search([PROMPTS[2]], search)
    assert llm.llm_engine.kv_cache_manager.prefix_cache_stats.hits == 8, "two blocks of a prompt with 12 tokens"
    assert_same(second[0], beams(first[0]))
    best = first[0].outputs[0].token_ids
    llm.generate([[*PROMPTS[2], *best]], params(1))
    assert llm.llm_engine.kv_cache_manager.prefix_cache_stats.hits == 8 + 20, "plus the output of the best beam"
