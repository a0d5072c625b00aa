"""Helpers of stage 7's notebook, compared with counts by hand and with the engine."""

import pytest

pytest.importorskip("matplotlib")

from notebooks.helpers import s7 as helpers
from notebooks.helpers.s7 import Machine
from stages.bench import offload
from tests.helpers import STORYTELLER


@pytest.mark.parametrize("policy", ["s6", "load", "recompute"])
def test_counts_match_the_bench(policy):
    counts, expected = helpers.count(policy, 1 / 3)._asdict(), offload.count_without_model(policy)
    assert {name: counts[name] for name in expected} == expected


def test_only_the_host_keeps_evicted_texts():
    moments = {policy: helpers.lives(policy, 1 / 3) for policy in ("s6", "load")}
    places = {policy: {place for moment in some for place in moment.values()} for policy, some in moments.items()}
    assert places["load"] == {*helpers.PLACES}
    assert places["s6"] == {*helpers.PLACES} - {"on the host"}
    assert moments["load"][0][0] == "running" and not moments["load"][-1]


def test_documents_are_found_if_a_tier_has_room():
    """6 documents of 4 blocks take turns 4 times. The small pool holds one of them."""
    assert helpers.hits_in_turn(6, 0, length=4) == (0, 0)
    assert helpers.hits_in_turn(6, 40, length=4) == (0, 0.75)
    assert helpers.hits_in_turn(40, 0, length=4) == (0.75, 0)


def test_others_run_while_the_blocks_of_c_arrive():
    beside, after = (helpers.two_streams(6, overlaps) for overlaps in (True, False))
    for lanes in (beside, after):
        assert lanes.loads == [(3, 9)]
        assert min(at for at, batch in lanes.steps if "C" in batch) >= 9, "C ran before its blocks had arrived"
    assert beside.tokens_during_loads() == 12 and after.tokens_during_loads() == 0
    assert after.end == beside.end + 6


@pytest.mark.parametrize("link, winner", [(1e6, True), (1e3, False)])
def test_map_matches_the_auto_policy(link, winner):
    machine = Machine("", bytes_per_second=link, tokens_per_second=100, bytes_per_token=100)
    assert machine.prefers_load is winner is (machine.ratio > 1)


def test_prompt_is_loaded_from_the_host_or_recomputed():
    load, compute = (helpers.Asker(STORYTELLER, 32, policy) for policy in ("load", "recompute"))
    before = [asker.engine.model_runner.num_tokens for asker in (load, compute)]
    for asker in (load, compute):
        asker()
    counts = [asker.engine.model_runner.num_tokens for asker in (load, compute)]
    assert [after - b for after, b in zip(counts, before, strict=True)] == [1, 33]
    assert load.engine.host_tier.num_blocks_loaded == 2 and compute.engine.host_tier.num_blocks_loaded == 0
