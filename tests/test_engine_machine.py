"""LLMEngine under any history that hypothesis can think of, in every stage that has one, on a tiny model.

Requests come and are aborted at any time, on pools and budgets of any size; where a stage has n, they have up to three
samples; where there is a host pool, preempted ones may go there, and copies may fail. Each says what it says alone, or
the beginning of it; none is lost; and when all have ended, every block is free and nothing of them is left.
"""

import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.helpers import MARGIN, ROOT, find_stages, folder_of, full
from tests.odd_models import OddModel, write_odd_model

MAX_MODEL_LEN = 40
LONGEST_ANSWER = 24
STAGES = [name for name in find_stages(ROOT) if (folder_of(name) / "engine.py").exists()]
PROMPTS = [[(29 * i + 3 * k) % 131 for k in range(n)] for i, n in enumerate([1, 2, 3, 4, 5, 8, 9, 12, 16])]
SEEDS = [None, 5]  # greedy, and sampled
MOST_SAMPLES = 3


class Request(NamedTuple):
    prompt: int  # its index
    seed: int | None
    max_tokens: int
    stop_at: int | None  # the place in the first sample's answer whose token is made a stop token
    n: int


Answers = dict[tuple[int, int | None, int], list[int]]  # of (prompt, seed, sample)


def has_samples(stage: ModuleType) -> bool:
    return "n" in {field.name for field in fields(stage.SamplingParams)}


def has_host_pool(stage: ModuleType) -> bool:
    return "swap_space_tokens" in {field.name for field in fields(stage.EngineConfig)}


class OutOfMemory(RuntimeError):
    pass


def fail(*_: Any) -> None:
    raise OutOfMemory


class Served(RuleBasedStateMachine):
    def __init__(self, make: Callable[..., Any], stage: ModuleType, answers: Answers) -> None:
        super().__init__()
        self.make, self.SamplingParams, self.answers = make, stage.SamplingParams, answers
        self.has_samples, self.has_host_pool = has_samples(stage), has_host_pool(stage)
        self.open: dict[str, Request] = {}  # in order of arrival
        self.seqs: list[weakref.ref] = []
        self.num_requests = 0

    @initialize(
        num_blocks=st.integers(1, 16),
        block_size=st.sampled_from([1, 2, 3, 4, 4, 8]),
        seats=st.sampled_from([1, 2, 3, 32]),
        budget=st.sampled_from([1, 2, 3, 5, 8, 64, 64]),
        watermark=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
        preemption=st.sampled_from(["swap", "swap", "recompute"]),
        swap_space_tokens=st.sampled_from([None, None, 0, 8, 24]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        seats: int,
        budget: int,
        watermark: float,
        preemption: str,
        swap_space_tokens: int | None,
    ) -> None:
        self.num_slots, self.budget, self.seats = num_blocks * block_size, budget, seats
        tiers = {"preemption": preemption, "swap_space_tokens": swap_space_tokens} if self.has_host_pool else {}
        self.engine = self.make(
            block_size=block_size,
            kv_cache_tokens=self.num_slots,
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            watermark=watermark,
            **tiers,
        )

    @rule(
        prompt=st.integers(0, len(PROMPTS) - 1),
        seed=st.sampled_from(SEEDS),
        max_tokens=st.integers(1, LONGEST_ANSWER),
        stop_at=st.none() | st.integers(0, LONGEST_ANSWER - 1),
        n=st.integers(1, MOST_SAMPLES),
    )
    def arrive(self, prompt: int, seed: int | None, max_tokens: int, stop_at: int | None, n: int) -> None:
        n = n if self.has_samples else 1
        request, request_id = Request(prompt, seed, max_tokens, stop_at, n), str(self.num_requests)
        self.num_requests += 1
        params = self.SamplingParams(
            temperature=0.0 if seed is None else 1.0,
            seed=seed,
            max_tokens=max_tokens,
            stop_token_ids=[] if stop_at is None else [self.answers[prompt, seed, 0][stop_at]],
            ignore_eos=True,
            **({"n": n} if self.has_samples else {}),
        )
        add = partial(self.engine.add_request, request_id, PROMPTS[prompt], params)
        if n > self.seats:
            with pytest.raises(ValueError, match=f"n is {n}, max_num_seqs is {self.seats}"):
                add()
            return
        if len(PROMPTS[prompt]) > self.num_slots:
            with pytest.raises(ValueError, match=r"needs \d+ blocks, the pool has \d+"):
                add()
            return
        add()
        self.open[request_id] = request
        self.seqs += [weakref.ref(self.engine.scheduler.waiting[-1 - i]) for i in range(n)]

    @precondition(lambda self: self.open)
    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            num_tokens = self.engine.model_runner.num_tokens
            for output in self.engine.step():
                self.hear(output)
            assert self.engine.model_runner.num_tokens - num_tokens <= self.budget
            self.is_whole()

    @precondition(lambda self: self.open)
    @rule()
    def step_whose_model_fails(self) -> None:
        """It computes nothing and loses nobody: what the next step brings is right."""
        self.engine.model_runner.run = fail
        try:
            for output in self.engine.step():
                self.hear(output)
        except OutOfMemory:
            pass
        finally:
            del self.engine.model_runner.run  # and the class has it again

    @precondition(lambda self: getattr(self.engine, "host_pool", None))
    @rule(verb=st.sampled_from(["store", "load"]), are_failing=st.booleans())
    def copies_fail_from_now_on(self, verb: str, are_failing: bool) -> None:
        """Whoever was to be moved is computed again, what was to be kept is forgotten, and nothing is lost."""
        vars(self.engine.host_pool).pop(verb, None)  # and the class has it again
        if are_failing:
            setattr(self.engine.host_pool, verb, fail)

    @precondition(lambda self: self.num_requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Anyone: who is here, who has ended or was refused, who never came."""
        request_id = str(data.draw(st.integers(0, self.num_requests)))
        output = self.engine.abort_request(request_id)
        assert (output is not None) == (request_id in self.open)
        if output:
            assert output.finished and "abort" in [completion.finish_reason for completion in output.outputs]
            self.hear(output)
        assert self.engine.abort_request(request_id) is None

    def hear(self, output: Any) -> None:
        """Each sample is the beginning of what it says alone, and ends where it should."""
        request = self.open[output.request_id]  # KeyError: one that has ended, or never came, says something
        assert output.prompt_token_ids == PROMPTS[request.prompt] and len(output.outputs) == request.n
        reasons = [completion.finish_reason for completion in output.outputs]
        for i, completion in enumerate(output.outputs):
            self.hear_sample(request, i, completion)
        assert (output.error is not None) == ("error" in reasons)
        if output.error and request.n == 1:
            said = output.outputs[0].token_ids
            assert len(PROMPTS[request.prompt]) + len(said) == self.num_slots + 1, "it had room"
        assert output.finished == (None not in reasons)
        if output.finished:
            del self.open[output.request_id]

    def hear_sample(self, request: Request, index: int, completion: Any) -> None:
        said, answer = completion.token_ids, self.answers[request.prompt, request.seed, index]
        stops = False
        if request.stop_at is not None:
            stop = self.answers[request.prompt, request.seed, 0][request.stop_at]
            stops = stop in answer
            answer = answer[: answer.index(stop) + 1] if stops else answer
        end = min(len(answer), request.max_tokens)
        assert said == answer[: len(said)]
        if completion.finish_reason in ("stop", "length"):
            assert len(said) == end
            assert (completion.finish_reason == "stop") == (stops and end == len(answer))
        else:
            assert len(said) < end, "it should have ended"

    @invariant()
    def is_whole(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.kv_cache_manager.check_integrity()
        assert self.engine.has_unfinished_requests() == bool(self.open)
        running, waiting = self.engine.scheduler.running, self.engine.scheduler.waiting
        ids = list(dict.fromkeys(seq.request_id for seq in [*running, *waiting]))
        assert ids == list(self.open), "nobody is lost or overtaken"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        tokens = (r.n * (len(PROMPTS[r.prompt]) + r.max_tokens + 1) for r in self.open.values())
        most = sum(tokens) * (len(self.open) + 1)
        for _ in range(most):
            if self.open:
                self.step(1)
        assert not self.open, f"they did not end in {most} steps"
        assert self.engine.kv_cache_manager.num_free_blocks == self.engine.kv_cache_manager.num_blocks
        if getattr(self.engine, "host_pool", None):
            self.engine.kv_cache_manager.collect(wait=True)
            assert self.engine.kv_cache_manager._host.num_free == self.engine.host_pool.num_blocks
        if any(seq() for seq in self.seqs):
            gc.collect()
        assert not any(seq() for seq in self.seqs), "something of a request is left"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> OddModel:
    return write_odd_model("one_layer", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=STAGES)
def served(request: pytest.FixtureRequest, tiny: OddModel) -> Iterator[tuple[Callable[..., Any], ModuleType, Answers]]:
    """An engine by its knobs, its stage, and what that says to each prompt alone: one model for all of them."""
    stage = importlib.import_module(request.param)
    engine_class = importlib.import_module(f"{request.param}.engine").LLMEngine
    config = partial(stage.EngineConfig, str(tiny.folder), max_model_len=MAX_MODEL_LEN)
    model = engine_class(config(kv_cache_tokens=16)).build_model()

    with_model = type("Engine", (engine_class,), {"build_model": lambda self: model})

    def make(**knobs: Any) -> Any:
        return with_model(config(**knobs))

    answers: Answers = {}
    for seed in SEEDS:
        engine = make(kv_cache_tokens=256)
        options = {"temperature": 0.0 if seed is None else 1.0, "seed": seed, "max_tokens": LONGEST_ANSWER}
        options |= {"n": MOST_SAMPLES} if has_samples(stage) else {}
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, stage.SamplingParams(ignore_eos=True, **options))
            while engine.has_unfinished_requests():
                (output,) = engine.step()
            for index, completion in enumerate(output.outputs):
                answers[i, seed, index] = completion.token_ids
    yield make, stage, answers


def test_what_they_say_alone_is_what_the_reference_says(served, tiny):
    """And nothing in it is close to a tie: choose other prompts if it is."""
    _, _, answers = served
    for i, prompt in enumerate(PROMPTS):
        greedy = tiny.oracle.greedy(prompt, LONGEST_ANSWER)
        assert min(greedy.margins) > MARGIN
        said, drawn = ([answers[i, seed, k] for k in range(MOST_SAMPLES) if (i, seed, k) in answers] for seed in SEEDS)
        assert said == [greedy.token_ids] * len(said)
        assert len(set(map(tuple, [*drawn, greedy.token_ids]))) == len(drawn) + 1


@pytest.mark.parametrize("num_histories", [10, full(100)])
def test_any_history(served, num_histories):
    run_state_machine_as_test(
        lambda: Served(*served),
        settings=settings(
            max_examples=num_histories,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
