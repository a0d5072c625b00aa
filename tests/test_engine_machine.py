"""Any history of any stage: by hypothesis, by seed as in `python -m tests.soak`, and those that once went wrong.

tests/history.py says what must hold after each step; tests/scripted_llm.py is the model. Planted faults show that histories
find what they are for.
"""

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests import soak
from tests.helpers import ROOT, find_stages, full
from tests.history import History, play
from tests.injected_faults import PLANTED, plant
from tests.plans import (
    Abort,
    Ask,
    Beams,
    Drain,
    Fail,
    Knobs,
    Plan,
    Step,
    random_ask,
    random_fail,
    random_knobs,
    random_stream,
    samples_of,
    smallest,
)
from tests.scripted_llm import Stage

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
        self.history.apply(random_fail(rng))

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
    assert counts["steps"] > 50 * num_histories and counts["raised"] > num_histories / 3, "this tests too little"
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


@pytest.mark.parametrize("fault", PLANTED)
def test_histories_find_planted_faults(fault, monkeypatch):
    stage = plant(PLANTED[fault], monkeypatch)
    monkeypatch.setattr(soak, "smallest", lambda plan, _: plan)  # shrinking takes time
    _, found = soak.play_some(stage.name, 0, range(100))
    assert found, "a hundred histories, and no fault"


# What once went wrong

KNOBS = Knobs(
    block_size=4,
    num_blocks=8,
    max_model_len=40,
    max_num_seqs=4,
    max_num_batched_tokens=8,
    watermark=0.0,
    enable_prefix_caching=True,
    num_host_blocks=64,
    offload_policy="load",
    reservation="request",
    load_delays=(9,),
)
ASK = Ask(0, 22, (49,), follows=False, n=1, max_tokens=1, seed=4, stop_token_ids=())


@each(from_stage(7))
def test_beams_wait_for_the_beginning_of_their_prompt(stage):
    """It was evicted, the host has it, and it takes its time."""
    others = ASK._replace(text=1, num_shared=30)
    counts = play(stage, Plan(KNOBS, [ASK, Drain(), others, Drain(), Beams(ASK._replace(max_tokens=9), width=1)]))
    assert counts["blocks loaded"] > 0


@each(from_stage(7))
def test_the_last_one_waits_for_blocks_that_a_load_still_holds(stage):
    """The load was for a sequence that was preempted: nobody else runs, and the pool is large enough."""
    knobs = KNOBS._replace(block_size=1, num_blocks=12, load_delays=(60,))
    first, second = (ASK._replace(text=text, num_shared=size, own=()) for text, size in ((0, 6), (1, 11)))
    long = ASK._replace(text=2, num_shared=4, own=(), max_tokens=9)
    counts = play(stage, Plan(knobs, [first, Drain(), second, Drain(), long, Step(1), first, Drain()]))
    assert counts["preempted"] > 0 and counts["blocks loaded"] > 0


@each(from_stage(4))
def test_a_request_that_failed_in_a_step_that_raised_can_be_aborted(stage):
    """The step's outputs are lost, and one of them said that the pool is too small for the request."""
    large = ASK._replace(num_shared=38, own=())
    play(stage, Plan(KNOBS._replace(num_blocks=2), [ASK._replace(num_shared=2), Fail(0), large, Drain()]))
    small = ASK._replace(num_shared=2, max_tokens=1)
    play(stage, Plan(KNOBS._replace(num_blocks=2), [large, small, Fail(0), Drain()]))


# How soon


@each(from_stage(5))
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 9, 17, 31])
def test_the_first_tokens_of_samples_come_at_most_a_step_later(stage, n, num_tokens, tmp_path):
    steps = []
    for samples in (1, n):
        history = History(stage, KNOBS._replace(num_blocks=40), tmp_path)
        history.apply(ASK._replace(num_shared=num_tokens - 1, n=samples))
        while not (outputs := history.llm.llm_engine.step()):
            pass
        assert all(completion.token_ids for completion in outputs[0].outputs)
        steps.append(history.num_steps)
    assert steps[0] == -(-num_tokens // KNOBS.max_num_batched_tokens)
    assert steps[1] <= steps[0] + 1


@each(from_stage(4))
@pytest.mark.parametrize("num_blocks", [2, 3, 5])
def test_a_lone_request_never_loops(stage, num_blocks, tmp_path):
    """It ends, or outgrows the pool, in as many steps as it gets tokens."""
    history = History(stage, KNOBS._replace(num_blocks=num_blocks), tmp_path)
    history.apply(ASK._replace(num_shared=5, own=(), max_tokens=30))
    history.apply(Drain())
    assert history.num_steps <= 30 and not history.open
    assert history.llm.llm_engine.scheduler.num_preemptions == 0
