"""Any history of any stage: by hypothesis, by seed as in `python -m tests.soak`, and those that once went wrong.

tests/history.py says what must hold after each step; tests/scripted.py is the model. Planted faults show that histories
find what they are for.
"""

import importlib
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests import soak
from tests.helpers import ROOT, find_stages, full
from tests.history import History, options, play
from tests.plans import (
    Abort,
    Ask,
    Beams,
    Drain,
    Knobs,
    Plan,
    Reset,
    Step,
    random_ask,
    random_fail,
    random_knobs,
    random_stream,
    samples_of,
    smallest,
)
from tests.scripted import Faults, Stage

STAGES = [Stage(name) for name in find_stages(ROOT)]
RANDOMS = st.randoms(use_true_random=False)  # what it draws hypothesis can shrink


def from_stage(number: int) -> list[Stage]:
    return [stage for stage in STAGES if stage.number >= number]


def each(stages: list[Stage]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("stage", stages, ids=[f"s{stage.number}" for stage in stages])


class Served(RuleBasedStateMachine):
    """The same events as in a seeded plan; hypothesis chooses, and shrinks what goes wrong."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self.folder = tempfile.TemporaryDirectory()

    @initialize(rng=RANDOMS)
    def start(self, rng: random.Random) -> None:
        self.history = History(self.stage, random_knobs(rng), Path(self.folder.name))

    @rule(rng=RANDOMS)
    def stream(self, rng: random.Random) -> None:
        self.history.apply(random_stream(self.stage, rng))

    @rule(rng=RANDOMS)
    def fail(self, rng: random.Random) -> None:
        self.history.apply(random_fail(self.stage, rng))

    @precondition(lambda self: self.stage.has_engine)
    @rule(rng=RANDOMS, count=st.integers(1, 4))
    def arrive(self, rng: random.Random, count: int) -> None:
        for _ in range(count):
            self.history.apply(random_ask(rng, samples_of(self.stage)))

    @precondition(lambda self: self.stage.has_engine)
    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        self.history.apply(Step(count))

    @precondition(lambda self: self.stage.has_engine)
    @rule()
    def drain(self) -> None:
        self.history.apply(Drain())

    @precondition(lambda self: self.stage.has_engine)
    @rule(which=st.integers(0, 9))
    def abort(self, which: int) -> None:
        self.history.apply(Abort(which))

    @precondition(lambda self: self.stage.has_samples)
    @rule(rng=RANDOMS, width=st.integers(1, 4))
    def beams(self, rng: random.Random, width: int) -> None:
        self.history.apply(Beams(random_ask(rng), width))

    @precondition(lambda self: self.stage.has_prefix_cache)
    @rule()
    def reset(self) -> None:
        self.history.apply(Reset())

    def teardown(self) -> None:
        if hasattr(self, "history"):
            self.history.finish()
        self.folder.cleanup()


@pytest.mark.parametrize("num_histories", [6, full(150)])
@each(STAGES)
def test_any_history(stage, num_histories):
    run_state_machine_as_test(
        lambda: Served(stage),
        settings=settings(
            max_examples=num_histories, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("num_histories", [8, full(100)])
@each(STAGES)
def test_seeded_histories(stage, num_histories):
    counts, fault = soak.play_some(stage.name, 7, range(num_histories))
    assert fault is None, str(fault)
    assert counts["steps"] > 50 * num_histories and counts["raised"] > num_histories, "this tests too little"
    if stage.has_engine:
        assert counts["preempted"] > num_histories / 2, "this tests too little"
    if stage.has_prefix_cache:
        assert counts["tokens hit"] > 10 * num_histories and counts["blocks copied"] > num_histories
    if stage.has_tiers:
        assert counts["blocks loaded"] > num_histories / 2 and counts["blocks stored"] > num_histories


@pytest.mark.full
def test_a_hundred_thousand_steps_by_the_command(capsys):
    assert soak.main(["--steps", "100000", "--seed", "1"]) == 0
    assert capsys.readouterr().out.endswith("seed 1: no fault\n")


# The command


def test_the_command_plays_one_history_again(capsys):
    assert soak.main(["--stage", "s4", "--seed", "3", "--history", "5"]) == 0
    first = capsys.readouterr().out
    assert " in 1 histories: " in first and first.endswith("seed 3: no fault\n")
    assert soak.main(["--stage", "s4", "--seed", "3", "--history", "5"]) == 0
    assert capsys.readouterr().out == first, "the same seed, other counts"
    assert soak.main(["--stage", "s99"]) == 2


def test_the_smallest_part_of_a_plan_that_is_still_faulty():
    events = [Step(i) for i in range(1, 30)]
    plan = smallest(Plan(None, events), lambda part: {Step(7), Step(20)} <= set(part.events))
    assert plan.events == [Step(7), Step(20)]


# Faults that are planted: each is found in a few histories


def patch(stage: Stage, path: str, new: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`path` is module.name or module.Class.name."""
    module, *owner, name = path.split(".")
    target = importlib.import_module(f"{stage.name}.{module}")
    monkeypatch.setattr(getattr(target, owner[0]) if owner else target, name, new)


class Planted(NamedTuple):
    stage: int
    path: str
    new: Any


def forget_all(scheduler: Any) -> None:
    """preempt_all() that lets them go on, with the copies that were never made."""


def evict_hits_first(pool: Any, blocks: list[int]) -> None:
    """touch() that leaves a cached block in the queue of the free ones."""
    for block in blocks:
        pool.ref_counts[block] += 1


def collect_at_once(manager: Any, wait: bool = False) -> None:
    """collect_loads() that takes all to be there."""
    for load in manager._loads:
        manager._host_pool.free_blocks(load.sources)
    manager._loads.clear()


def hash_alone(parent: bytes, token_ids: list[int]) -> bytes:
    """hash_block_tokens() that does not know what came before."""
    return repr(token_ids).encode()


PLANTED = {
    "a sequence is computed twice at once": Planted(1, "slot_manager.SlotManager._first_fit", lambda *_: 0),
    "a full table gets no block": Planted(2, "block_manager.BlockManager.can_append", lambda *_: True),
    "nobody is preempted": Planted(4, "block_manager.BlockManager.can_append", lambda *_: True),
    "no watermark and no seats": Planted(4, "scheduler.Scheduler._may_admit", lambda *_: True),
    "copies are lost": Planted(5, "kv_cache.KVCache.copy_blocks", lambda *_: None),
    "a step that breaks off goes on": Planted(5, "scheduler.Scheduler.preempt_all", forget_all),
    "a shared block is written": Planted(5, "block_manager.BlockManager._is_shared", lambda *_: False),
    "a hash without its prefix": Planted(6, "prefix_cache.hash_block_tokens", hash_alone),
    "a hit stays free": Planted(6, "block_pool.BlockPool.touch", evict_hits_first),
    "nobody waits for a load": Planted(7, "block_manager.BlockManager.is_ready", lambda *_: True),
    "loads have always arrived": Planted(7, "block_manager.BlockManager.collect_loads", collect_at_once),
    "a text is on the host and its bytes are not": Planted(7, "offload.HostKVCache.store", lambda *_: None),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_histories_find_planted_faults(fault, monkeypatch):
    planted = PLANTED[fault]
    stage = STAGES[planted.stage - 1]
    patch(stage, planted.path, planted.new, monkeypatch)
    monkeypatch.setattr(soak, "smallest", lambda plan, _: plan)  # shrinking takes time
    _, found = soak.play_some(stage.name, 0, range(100))
    assert found, "a hundred histories, and no fault"


# What once went wrong

KNOBS = Knobs(
    block_size=2,
    num_blocks=3,
    max_model_len=24,
    max_num_seqs=8,
    max_num_batched_tokens=8,
    watermark=0.0,
    enable_prefix_caching=True,
    num_host_blocks=64,
    offload_policy="load",
    reservation="request",
    load_delays=(9,),
)
