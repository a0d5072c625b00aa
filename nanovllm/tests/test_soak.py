"""Histories with faults: some seeds of `python -m nanovllm.tests.soak`, and deliberate bugs that they must find."""

import random
from collections import Counter

import pytest

from ..engine.block_manager import BlockManager
from ..engine.block_pool import BlockPool
from ..engine.scheduler import Scheduler
from ..engine.sequence import Sequence
from .soak.history import play, play_traced
from .soak.plans import Fail, Plan, Step, random_plan, smallest
from .soak.run import error_of, history_plan, main

pytestmark = pytest.mark.filterwarnings("ignore:.* requests were not served")


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.full) for part in range(1, 8))])
def test_all_invariants_hold_after_each_step_of_a_history(part):
    counts = sum((play(history_plan(1, part * 10 + i)) for i in range(4)), Counter())
    assert counts["steps"] > 200 and counts["raised"] > 2 and counts["preempted"] > 2, f"too little: {counts}"


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in range(1, 8))])
def test_history_is_the_same_if_no_sequence_is_plain(part, monkeypatch):
    """Plain sequences take a short way through each step. It leads to the same events.

    The short way does not look for a slot or a load in each step, so these plans count no such looks.
    """
    plans = []
    for plan in (history_plan(2, part * 3 + i) for i in range(3)):
        events = [each for each in plan.events if not is_slot_fault(each)]
        plans.append(Plan(plan.setup._replace(load_delays=(0,)), events))
    short = [play_traced(plan) for plan in plans]
    monkeypatch.setattr(Sequence, "is_plain", False)
    assert sum(map(len, short)) > 1000
    for plan, events in zip(plans, short, strict=True):
        assert [without_time(event) for event in play_traced(plan)] == [without_time(event) for event in events]


def is_slot_fault(event):
    return isinstance(event, Fail) and event.operation == "slot"


def without_time(event):
    return {name: value for name, value in event.items() if name not in ("began", "seconds")}


def free_nothing(monkeypatch):
    monkeypatch.setattr(Scheduler, "preempt_all", lambda scheduler: None)


def copy_nothing(monkeypatch):
    def has_room(manager, seq):
        return seq.num_tokens_with_placeholders <= len(seq.block_table) * manager.block_size

    monkeypatch.setattr(BlockManager, "_has_slot", has_room)


def evict_the_newest(monkeypatch):
    free_blocks = BlockPool.free_blocks

    def free_in_front(pool, blocks):
        free_blocks(pool, blocks)
        for block in blocks:
            if block in pool.free:
                pool.free.move_to_end(block, last=False)

    monkeypatch.setattr(BlockPool, "free_blocks", free_in_front)


@pytest.mark.parametrize("plant", [free_nothing, copy_nothing, evict_the_newest])
def test_deliberate_bug_is_found(plant, monkeypatch):
    plant(monkeypatch)
    assert any(error_of(history_plan(3, i)) for i in range(25))


def test_smallest_part_of_a_faulty_history_is_shown():
    plan = random_plan(random.Random(5), 40)
    part = smallest(plan, lambda part: sum(isinstance(event, Step) for event in part.events) >= 2)
    assert [type(event) for event in part.events] == [Step, Step] and isinstance(part, Plan)


def test_command_prints_its_counts(capsys):
    assert main(["--seed", "4", "--history", "3"]) == 0
    out = capsys.readouterr().out
    assert " requests in 1 histories: " in out and out.endswith("seed 4: no fault\n")
