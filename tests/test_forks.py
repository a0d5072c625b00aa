"""Shared blocks: what notebooks/forks.py notes of an engine, against runs drawn by hand, and stages in pairs."""

import doctest
import time

import pytest
from click.testing import CliRunner

pytest.importorskip("matplotlib")

from notebooks import forks, pictures_s5
from notebooks.forks import Ask, Moment
from stages import s5_cow_sampling as s5
from stages import serving
from stages.predict.s5 import counted
from stages.workload import mixed_workload
from tests.helpers import ROOT

MODEL = ROOT / "models" / "storyteller"
OPTIONS = {"model": str(MODEL), "block_size": 4, "kv_cache_tokens": 256}


def test_who_shares_is_counted_once_and_copies_at_their_step():
    """5 tokens are 2 blocks. Of 3 samples 2 copy the second; token 8 needs a third block of each."""
    asks = Ask(5, 5, n=3)
    moments = forks.serve_anew(OPTIONS, asks)
    assert moments == [Moment(2, 6, 0), Moment(4, 6, 2), Moment(4, 6, 0), Moment(4, 6, 0), Moment(7, 9, 0)]
    assert forks.blocks_at_most(moments) == 7


def test_requests_share_nothing_and_a_full_block_is_not_copied():
    assert [moment[:2] for moment in forks.serve_anew(OPTIONS, Ask(5, 2), Ask(5, 2))] == [(4, 4), (4, 4)]
    assert forks.serve_anew(OPTIONS, Ask(4, 2, n=3)) == [Moment(1, 3, 0), Moment(4, 6, 0)]


def test_without_a_model_as_many_blocks_are_held_and_copied():
    found = counted(MODEL, 200)["samples"]
    llm = s5.LLM(MODEL, dtype="float32", kv_cache_tokens=8192)
    llm.generate([[3 + i for i in range(200)]], s5.SamplingParams(n=8, max_tokens=64, ignore_eos=True))
    assert found["blocks"] == llm.peak.held // 16 and found["copied"] == llm.kv_cache.num_blocks_copied == 7
    assert found["tokens_computed"] == llm.model_runner.num_tokens == 200 + 8 * 63


@pytest.mark.parametrize("num_prompt_tokens, num_own_tokens, n", [(5, 1, 2), (5, 9, 3), (8, 4, 2), (3, 2, 4)])
def test_what_is_saved_is_what_arithmetic_says(num_prompt_tokens, num_own_tokens, n):
    saved = forks.saving(OPTIONS, num_prompt_tokens, num_own_tokens, n)
    assert saved == pytest.approx(forks.saved(num_prompt_tokens, num_own_tokens, n, block_size=4))


@pytest.mark.parametrize("drops_the_first, counts, left", [(False, [1, 2, 3, 2, 1], 2), (True, [1, 2, 3, 2, 1, 0], 0)])
def test_blocks_leak_if_the_first_owner_never_lets_go(drops_the_first, counts, left):
    assert forks.shared_prompt(6, 4, drops_the_first) == (counts, left)


def test_a_watched_search_finds_what_it_finds_alone_and_its_counts_are_the_managers():
    params = s5.BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    llm = s5.LLM(**OPTIONS, dtype="float32")
    (alone,) = llm.beam_search("Once upon a time", params)
    num_copied = llm.kv_cache.num_blocks_copied
    search = forks.WatchedBeams(llm.llm_engine, params)
    assert search.run("watched", "Once upon a time").outputs == alone.outputs
    assert [len(step.beams) for step in search.steps] == [1, 3, 3, 3, 3, 3]
    assert sum(len(step.copies) for step in search.steps) == num_copied > 0
    for step in search.steps:
        assert sum(step.ref_counts.values()) == sum(len(beam.table) for beam in step.beams)
        assert all(step.ref_counts[target] == 1 for _, target in step.copies), "a copy is held by its writer alone"
    figure = pictures_s5.beam_steps(search.steps[1:3], 1, "Two steps")
    shown = [text.get_text() for ax in figure.axes for text in ax.texts]
    assert {beam.text for step in search.steps[1:3] for beam in step.beams} <= {*shown} and "×3" in shown


def test_costs_leave_the_pool_as_it_is_or_copy_what_they_say():
    engine = forks.WithoutModel(**OPTIONS)
    parent, child = (engine.input_processor.process(name, [1] * 6, s5.SamplingParams())[0] for name in "ab")
    engine.kv_cache_manager.allocate(parent)
    parent.num_computed_tokens = 6
    forks.fork_and_free(engine.kv_cache_manager, parent, child)
    engine.kv_cache_manager.check_integrity()
    engine.kv_cache.blocks[1:3] = 1.0
    forks.copy_and_wait(engine.kv_cache, {3: 1})
    forks.copy_each(engine.kv_cache, {4: 3, 5: 4})
    assert (engine.kv_cache.blocks[3:6] == 1).all() and engine.kv_cache.num_blocks_copied == 3


@pytest.mark.parametrize("module", [forks, pictures_s5], ids=lambda module: module.__name__)
def test_examples_in_docstrings(module):
    assert doctest.testmod(module).failed == 0


# Stages in pairs


def test_a_pair_is_two_runs_of_the_same_work_and_who_is_first_takes_turns(monkeypatch):
    orders, seconds = [], iter([9.0, *[2.0, 4.0, 3.0]])

    def serve(names, folder, requests, dtype, bar):
        orders.append(list(names))
        return {"a": {"tokens_per_second": 1.0}, "b": {"tokens_per_second": next(seconds)}}

    monkeypatch.setattr(serving, "serve_in_turns", serve)
    found = serving.compare(["a", "b"], MODEL, [], "float32", num_pairs=3)
    assert found == {"pairs": 3, "ratio": 3.0, "least": 2.0, "largest": 4.0, "a": 1.0, "b": 3.0}, "the first warms up"
    assert orders == [["b", "a"], ["a", "b"], ["b", "a"], ["a", "b"]]


def test_stages_are_compared_on_the_same_tokens():
    requests = [r._replace(num_output_tokens=4) for r in mixed_workload(4096, 2)]
    started = time.perf_counter()
    found = serving.compare(["s4", "s5"], MODEL, requests, "float32", num_pairs=1)
    assert found["least"] == found["ratio"] == found["largest"] == pytest.approx(found["s5"] / found["s4"])
    assert min(found["s4"], found["s5"]) > 8 / (time.perf_counter() - started)


def test_a_pair_is_of_two():
    result = CliRunner().invoke(serving.main, ["--stage", "s4", "--pairs", "7"])
    assert result.exit_code == 2 and "compares two stages, not 1" in result.output
