"""Helpers of the notebook beyond stage 7: blocks and guesses as an engine's events tell of them, and the break-even."""

import doctest

import pytest

pytest.importorskip("matplotlib")

from nanovllm import LLM
from nanovllm.bench.workload import Task
from nanovllm.trace import traced
from notebooks.helpers import beyond as helpers
from notebooks.helpers.beyond import BLOCK, Rows
from notebooks.helpers.nanovllm import DecodeStep
from stages.bench.speculation import edits_forced, serve_with
from tests.helpers import STORYTELLER


def test_docstring_examples():
    assert doctest.testmod(helpers).failed == 0


def test_blocks_are_found_in_each_place():
    answers = helpers.restart(STORYTELLER, [*range(100, 100 + 4 * BLOCK - 1)])
    assert {name: answer.tries for name, answer in answers.items()} == {
        "a new prompt": [["computed"] * 4],
        "the same again": [["device"] * 3 + ["computed"]],
        "after another prompt": [["device"] * 2 + ["host"] + ["computed"]],
        "a second engine": [["disk"] * 3 + ["computed"]],
        "a third one, another question": [["disk"] * 1 + ["computed"] * 3],
        "a fourth one, with a damaged file": [
            ["disk"] * 2 + ["lost"] + ["computed"],
            ["device"] * 2 + ["computed"] * 2,
        ],
    }
    assert len({answer.token for name, answer in answers.items() if "question" not in name}) == 1


def test_steps_tell_right_guesses_from_wrong_ones():
    """The output follows the prompt, and leaves it every fifth token."""
    speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 2}
    llm = LLM(str(STORYTELLER), device="cpu", dtype="float32", kv_cache_tokens=64, speculative_config=speculation)
    task, events = Task([*range(100, 120)], 12), []
    with edits_forced(llm, 5), traced(llm, events.append):
        served = serve_with(llm, [task], drafts=True)
    steps = helpers.steps_of(events)
    texts = [text for step in steps for text in (*step.accepted, step.sampled)]
    assert texts == [event["text"] for event in events if event["kind"] == "token"] and len(texts) == 12
    assert sum(len(step.accepted) for step in steps) == served.num_accepted > 0
    assert sum(len(step.rejected) for step in steps) == served.num_drafted - served.num_accepted > 0


@pytest.mark.nightly  # since it compiles kernels
def test_costs_of_drafts_leave_the_engine_as_it_was():
    step = DecodeStep(STORYTELLER, "float32", max_rows=2, context=40)
    tables = [list(seq.block_table) for seq in step.seqs]
    costs = helpers.draft_costs(step, (1, 2), (0, 20), num_rounds=1)
    assert {*costs} == {Rows(1, 0), Rows(1, 20), Rows(2, 0), Rows(2, 20)} and min(costs.values()) > 0
    assert [seq.block_table for seq in step.seqs] == tables and not any(seq.draft_token_ids for seq in step.seqs)
    step.engine.kv_cache_manager.check_integrity()


@pytest.mark.parametrize("length", [1, 2, 8])
def test_at_the_break_even_a_step_gives_what_it_costs(length):
    for cost in (1.1, 1.5, 1.9):
        assert helpers.expected_tokens(helpers.break_even(cost, length), length) == pytest.approx(cost)
