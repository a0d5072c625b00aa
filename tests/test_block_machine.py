"""BlockManager under random histories, in every stage that has one (tests/pool_machine.py)."""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.helpers import ROOT, find_stages, full
from tests.injected_faults import INJECTED_FAULTS, inject
from tests.pool_machine import PoolMachine
from tests.scripted_llm import Stage

STAGES = [stage for stage in map(Stage, find_stages(ROOT)) if stage.number >= 2]
FAULTS = ["a shared block is written", "a hash without its prefix", "a hit stays in the free queue"]


def run(stage: Stage, num_histories: int, **options: object) -> None:
    settings_ = settings(max_examples=num_histories, stateful_step_count=40, deadline=None, **options)
    run_state_machine_as_test(lambda: PoolMachine(stage), settings=settings_)


@pytest.mark.parametrize("num_histories", [10, full(60)])
@pytest.mark.parametrize("stage", STAGES, ids=[f"s{stage.number}" for stage in STAGES])
def test_random_histories(stage, num_histories):
    run(stage, num_histories)


@pytest.mark.parametrize("fault", FAULTS)
def test_histories_find_injected_faults(fault, monkeypatch):
    stage = inject(INJECTED_FAULTS[fault], monkeypatch)
    with pytest.raises(AssertionError):
        run(stage, 300, phases=[Phase.generate], derandomize=True, database=None)
