"""What stage 7's notebook and measurements are made with: counted by hand, and against the engine itself."""

import doctest
import json

import pytest

pytest.importorskip("matplotlib")

from notebooks import pictures_s7, tiers
from notebooks.tiers import Ask, Where, WithoutModel
from stages import figures, swapping
from stages.s7_cpu_offload.cost_model import CostModel
from tests.helpers import ROOT

OPTIONS = {"model": str(ROOT / "models" / "storyteller"), "dtype": "float32", "enable_prefix_caching": False}
LOAD = [Ask(8, 24)] * 4  # 8 blocks of 4 each in the end


def engine(policy: str, model: CostModel | None = None) -> WithoutModel:
    return WithoutModel(model, preemption=policy, block_size=4, kv_cache_tokens=48, swap_space_tokens=128, **OPTIONS)


@pytest.mark.parametrize("module", [pictures_s7, swapping, tiers], ids=lambda module: module.__name__)
def test_examples_in_docstrings(module):
    assert doctest.testmod(module).failed == 0


def test_what_is_swapped_is_not_computed_twice():
    again, swap = (tiers.counts(engine(policy), LOAD) for policy in ("recompute", "swap"))
    assert again.preemptions > 0 and again.computed_twice > 0 and again.blocks_swapped == 0
    assert swap.preemptions > 0 and swap.computed_twice == 0 and swap.blocks_swapped > 0
    assert swap.tokens_computed == 4 * (8 + 24 - 1)


def test_auto_takes_the_cheaper_way():
    quick, slow = CostModel(1e9, 1000), CostModel(1e3, 1000)
    assert tiers.counts(engine("auto", quick), LOAD) == tiers.counts(engine("swap"), LOAD)
    assert tiers.counts(engine("auto", slow), LOAD) == tiers.counts(engine("recompute"), LOAD)


def test_a_request_is_in_one_place_at_a_time():
    moments = {policy: tiers.serve(engine(policy), LOAD) for policy in ("swap", "recompute")}
    assert all(not (at.device and at.host) for moment in moments["swap"] for at in moment.values())
    places = {
        policy: {pictures_s7.place_of(at) for moment in some for at in moment.values()}
        for policy, some in moments.items()
    }
    assert places == {"swap": {"device", "host"}, "recompute": {"device", "waits"}}
    assert moments["swap"][0][0] == Where(2, 0) and not moments["swap"][-1]


def test_samples_move_what_they_share_once():
    """A prompt of 8 tokens, 2 blocks; each of 3 samples has 2 computed tokens more after 3 steps, in a block alone."""
    swapped = tiers.swap_samples(Ask(8, 8, n=3), 3, block_size=4, kv_cache_tokens=64, **OPTIONS)
    assert swapped == tiers.Swapped(entries=9, stored=5, loaded=5)


def test_the_texts_swap_loses_what_it_keeps_and_ours_does_not():
    assert [tiers.told_swap(others, is_copied_first=False) for others in range(3)] == [False, False, False]
    assert [tiers.told_swap(others, is_copied_first=True) for others in range(3)] == [False, True, False]
    assert all(tiers.our_swap(others, **OPTIONS) for others in range(3))


def test_loads_have_the_length_that_they_say():
    for load in swapping.LOADS.values():
        assert {len(r.prompt_token_ids) + r.num_output_tokens for r in load.requests} == {swapping.CONTEXT}
        assert 0.28 < load.pool_tokens / load.num_tokens < 0.36


@pytest.mark.parametrize("policy", ["recompute", "swap"])
@pytest.mark.parametrize("name", swapping.LOADS)
def test_counts_in_the_lesson_are_what_the_engine_does(name, policy):
    """Of steps, tokens and blocks: no model is needed, and no clock."""
    load = swapping.LOADS[name]
    engine = WithoutModel(preemption=policy, **OPTIONS | load.options)
    counts = tiers.counts(engine, [Ask(len(prompt), output, load.n) for prompt, output in load.requests])
    told = json.loads((ROOT / figures.RESULTS).read_text("utf-8"))["swapping"][name][policy]
    assert counts._asdict() == {key: told[key] for key in counts._fields}
