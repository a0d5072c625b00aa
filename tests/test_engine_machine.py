"""Random histories of every stage: by hypothesis, by seed as in `python -m tests.soak`, and those that once failed.

The branch more_beams has some, too. tests/history.py has the checks after each step, tests/scripted_llm.py the model.
Injected faults show that histories find faults.
"""

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests import soak
from tests.helpers import ROOT, find_stages
from tests.history import History, play
from tests.injected_faults import INJECTED_FAULTS, inject
from tests.plans import (
    Abort,
    Beams,
    Drain,
    EngineOptions,
    Fail,
    Plan,
    Request,
    Step,
    random_fail,
    random_options,
    random_request,
    random_stream,
    samples_of,
    shrink,
)
from tests.scripted_llm import Stage

STAGES = [Stage(name) for name in find_stages(ROOT)]
WITH_BEAMS = Stage("stages.more_beams")
RANDOMS = st.randoms(use_true_random=False)  # hypothesis can shrink its draws


def from_stage(number: int) -> list[Stage]:
    return [stage for stage in STAGES if stage.number >= number]


def each(stages: list[Stage]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("stage", stages, ids=[stage.key for stage in stages])


class EngineMachine(RuleBasedStateMachine):
    """The events of a seeded plan, chosen by hypothesis, which shrinks failures."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self.folder = tempfile.TemporaryDirectory()

    @initialize(rng=RANDOMS)
    def start(self, rng: random.Random) -> None:
        self.history = History(self.stage, random_options(rng), Path(self.folder.name))

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
            self.history.apply(random_request(rng, samples_of(self.stage)))

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

    @precondition(lambda self: self.stage.has_beams)
    @rule(rng=RANDOMS, width=st.integers(1, 4))
    def beams(self, rng: random.Random, width: int) -> None:
        self.history.apply(Beams(random_request(rng), width))

    def teardown(self) -> None:
        if hasattr(self, "history"):
            self.history.finish()
        self.folder.cleanup()


@pytest.mark.parametrize("num_histories", [4, pytest.param(60, marks=pytest.mark.nightly)])
@each([*STAGES, WITH_BEAMS])
def test_random_histories(stage, num_histories):
    run_state_machine_as_test(
        lambda: EngineMachine(stage),
        settings=settings(
            max_examples=num_histories, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("num_histories", [5, pytest.param(40, marks=pytest.mark.nightly)])
@each([*STAGES, WITH_BEAMS])
def test_seeded_histories(stage, num_histories):
    counts, fault = soak.play_some(stage.name, 7, range(num_histories))
    assert fault is None, str(fault)
    assert counts["steps"] > 50 * num_histories and counts["raised"] > num_histories / 6, "this tests too little"
    if stage.has_engine:
        assert counts["preempted"] > num_histories / 2, "this tests too little"
    if stage.has_prefix_cache:
        assert counts["tokens hit"] > 10 * num_histories and counts["blocks copied"] > num_histories
    if stage.has_tiers:
        assert counts["blocks loaded"] > num_histories / 2 and counts["blocks stored"] > num_histories


@pytest.mark.nightly
def test_command_plays_40000_steps(capsys):
    assert soak.main(["--steps", "40000", "--seed", "1"]) == 0
    assert capsys.readouterr().out.endswith("seed 1: no fault\n")


# The command


def test_command_replays_one_history(capsys):
    assert soak.main(["--stage", "s4", "--seed", "3", "--history", "5"]) == 0
    first = capsys.readouterr().out
    assert " in 1 histories: " in first and first.endswith("seed 3: no fault\n")
    assert soak.main(["--stage", "s4", "--seed", "3", "--history", "5"]) == 0
    assert capsys.readouterr().out == first, "the same seed must give the same counts"
    assert soak.main(["--stage", "s99"]) == 2


def test_shrinking_keeps_only_the_faulty_events():
    events = [Step(i) for i in range(1, 30)]
    plan = shrink(Plan(None, events), lambda part: {Step(7), Step(20)} <= set(part.events))
    assert plan.events == [Step(7), Step(20)]


# Injected faults: a few histories find each


@pytest.mark.parametrize("fault", INJECTED_FAULTS)
def test_histories_find_injected_faults(fault, monkeypatch):
    stage = inject(INJECTED_FAULTS[fault], monkeypatch)
    monkeypatch.setattr(soak, "shrink", lambda plan, _: plan)  # shrinking takes time
    _, result = soak.play_some(stage.name, 0, range(100))
    assert result, "a hundred histories did not find the fault"


# Regressions

OPTIONS = EngineOptions(
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
REQUEST = Request(0, 22, (49,), follows=False, n=1, max_tokens=1, seed=4, stop_token_ids=())


@each(from_stage(7))
def test_last_sequence_waits_for_blocks_that_a_load_holds(stage):
    """The load was for a preempted sequence. No other sequence runs, and the pool is large enough."""
    options = OPTIONS._replace(block_size=1, num_blocks=12, load_delays=(60,))
    first, second = (REQUEST._replace(text=text, num_shared=size, own=()) for text, size in ((0, 6), (1, 11)))
    long = REQUEST._replace(text=2, num_shared=4, own=(), max_tokens=9)
    counts = play(stage, Plan(options, [first, Drain(), second, Drain(), long, Step(1), first, Drain()]))
    assert counts["preempted"] > 0 and counts["blocks loaded"] > 0


@each(from_stage(4))
def test_request_that_failed_in_a_raising_step_can_be_aborted(stage):
    """The step's outputs are lost, and with them the error that the pool is too small for the request."""
    large = REQUEST._replace(num_shared=38, own=())
    play(stage, Plan(OPTIONS._replace(num_blocks=2), [REQUEST._replace(num_shared=2), Fail(0), large, Drain()]))
    small = REQUEST._replace(num_shared=2, max_tokens=1)
    play(stage, Plan(OPTIONS._replace(num_blocks=2), [large, small, Fail(0), Drain()]))


# Latency


@each(from_stage(5))
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 9, 17, 31])
def test_first_tokens_of_samples_come_at_most_one_step_later(stage, n, num_tokens, tmp_path):
    steps = []
    for samples in (1, n):
        history = History(stage, OPTIONS._replace(num_blocks=40), tmp_path)
        history.apply(REQUEST._replace(num_shared=num_tokens - 1, n=samples))
        while not (outputs := history.llm.llm_engine.step()):
            pass
        assert all(completion.token_ids for completion in outputs[0].outputs)
        steps.append(history.num_steps)
    assert steps[0] == -(-num_tokens // OPTIONS.max_num_batched_tokens)
    assert steps[1] <= steps[0] + 1


@each(from_stage(4))
@pytest.mark.parametrize("num_blocks", [2, 3, 5])
def test_lone_request_never_loops(stage, num_blocks, tmp_path):
    """Serve one request: it finishes or outgrows the pool in at most one step per token."""
    history = History(stage, OPTIONS._replace(num_blocks=num_blocks), tmp_path)
    history.apply(REQUEST._replace(num_shared=5, own=(), max_tokens=30))
    history.apply(Drain())
    assert history.num_steps <= 30 and not history.open
    assert history.llm.llm_engine.scheduler.num_preemptions == 0
