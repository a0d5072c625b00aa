"""LLMEngine: requests arrive, end and are aborted between steps, the pool runs out, and the model fails.

The model is scripted, and its answers depend on every slot that a sequence reads.
"""

import signal
import weakref

import pytest

from ...engine.sequence import Sequence
from ...llm_engine import LLMEngine
from ...requests.outputs import CompletionOutput, RequestOutput
from ...requests.tokens import SampledToken
from ..testing.checkpoints import byte_ids
from ..testing.engines import (
    Batch,
    answer,
    answer_alone,
    assert_empty,
    assert_whole,
    executor_of,
    params,
    reason,
    run_to_the_end,
    scripted_engine,
    step,
)
from .test_interrupts import each_line, lines_run

# Requests come and go


def test_request_runs_from_the_next_step_on(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=20)
    engine.add_request("a", [1, 2, 3], params(4))
    assert answer(step(engine)["a"]) == answer_alone([1, 2, 3], 1)
    engine.add_request("b", [1, 2], params(2))
    assert [list(step(engine)) for _ in range(3)] == [["a", "b"], ["a", "b"], ["a"]]
    assert engine.executor.steps == [[("a", 3)], [("a", 1), ("b", 2)], [("a", 1), ("b", 1)], [("a", 1)]]
    assert_empty(engine)


def test_step_returns_the_output_so_far_of_requests_with_a_new_token(checkpoint):
    """Request b's prompt takes two steps, so the first one returns no output for it."""
    engine = scripted_engine(checkpoint, num_blocks=20, max_num_batched_tokens=6)
    engine.add_request("a", [1, 2, 3], params(3)), engine.add_request("b", [5] * 7, params(1))
    outputs = [step(engine) for _ in range(3)]
    assert [list(by_id) for by_id in outputs] == [["a"], ["a", "b"], ["a"]]
    assert [answer(by_id["a"]) for by_id in outputs] == [answer_alone([1, 2, 3], n) for n in (1, 2, 3)]
    assert [by_id["a"].finished for by_id in outputs] == [False, False, True]
    assert outputs[1]["b"].prompt_token_ids == [5] * 7 and answer(outputs[1]["b"]) == answer_alone([5] * 7, 1)


def test_request_id_must_be_unique(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=20)
    engine.add_request("a", [1, 2, 3], params(4))
    for _ in range(2):
        with pytest.raises(ValueError, match="request_id must be unique, got 'a'"):
            engine.add_request("a", [9], params(9))
        assert len(engine.scheduler.waiting) + len(engine.scheduler.running) == 1
        step(engine)
    assert answer(run_to_the_end(engine)["a"]) == answer_alone([1, 2, 3], 4)


def test_invalid_prompt_is_refused_and_leaks_nothing(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=20)
    too_long = [1] * 64
    for prompt, error in (([], "the prompt is empty"), ([320], "got 320"), (too_long, "got 64")):
        with pytest.raises(ValueError, match=error):
            engine.add_request("a", prompt, params(1))
        assert_empty(engine)


# At capacity: a pool of 4 blocks with 16 slots. The last token of an output needs no slot.


def capacity(checkpoint, num_prompt_tokens: int, max_tokens: int) -> RequestOutput:
    engine = scripted_engine(checkpoint, num_blocks=4)
    engine.add_request("a", [1] * num_prompt_tokens, params(max_tokens))
    return run_to_the_end(engine)["a"]


@pytest.mark.parametrize("num_prompt_tokens", [15, 16])
def test_prompt_that_fills_the_pool_or_all_but_a_slot_is_served(checkpoint, num_prompt_tokens):
    output = capacity(checkpoint, num_prompt_tokens, 1)
    assert answer(output) == answer_alone([1] * num_prompt_tokens, 1) and reason(output) == "length"


def test_prompt_one_token_larger_than_the_pool_is_refused(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=4)
    with pytest.raises(ValueError, match="the pool of 4 blocks, got one that needs 5"):
        engine.add_request("a", [1] * 17, params(1))
    assert_empty(engine)


@pytest.mark.parametrize(
    "num_prompt_tokens, max_tokens, num_tokens, finish_reason",
    [
        (3, 13, 13, "length"),  # one below: 15 of 16 slots
        (3, 14, 14, "length"),  # all 16 slots
        (3, 15, 14, "error"),  # one above
        (3, 40, 14, "error"),
        (16, 1, 1, "length"),
        (16, 2, 1, "error"),
        (1, 16, 16, "length"),
        (1, 17, 16, "error"),
    ],
)
def test_request_gets_all_tokens_that_fit_the_pool(
    checkpoint, num_prompt_tokens, max_tokens, num_tokens, finish_reason
):
    output = capacity(checkpoint, num_prompt_tokens, max_tokens)
    assert answer(output) == answer_alone([1] * num_prompt_tokens, num_tokens)
    assert reason(output) == finish_reason
    assert output.error == ("17 tokens need 5 blocks, the pool has 4" if finish_reason == "error" else None)


def test_request_that_outgrows_the_pool_ends_with_an_error_and_others_continue(checkpoint):
    """In the end, a needs 5 blocks, and the pool has 4. b and c, which were preempted for it, get all their tokens."""
    engine = scripted_engine(checkpoint, num_blocks=4)
    lengths = {"a": 40, "b": 10, "c": 12}
    for i, (name, num_tokens) in enumerate(lengths.items()):
        engine.add_request(name, [i + 1] * 3, params(num_tokens))
    ended = run_to_the_end(engine)
    assert engine.scheduler.num_preemptions >= 2
    assert ended["a"].error == "17 tokens need 5 blocks, the pool has 4" and reason(ended["a"]) == "error"
    assert answer(ended["a"]) == answer_alone([1, 1, 1], 14), "it keeps its tokens"
    assert ended["a"].metrics.first_token_time < ended["a"].metrics.finished_time
    for i, name in ((2, "b"), (3, "c")):
        assert (answer(ended[name]), reason(ended[name])) == (answer_alone([i] * 3, lengths[name]), "length")
        assert ended[name].error is None


# Abort


STATES = ["waiting", "mid-prefill", "running", "preempted"]


def engine_with_b(checkpoint, state: str) -> LLMEngine:
    """Return an engine with b, of 6 tokens, in this state. a runs and has a new token; c waits behind b or runs."""
    num_blocks, budget = {"preempted": (3, 16), "mid-prefill": (20, 6)}.get(state, (20, 16))
    engine = scripted_engine(checkpoint, num_blocks, max_num_batched_tokens=budget, max_num_seqs=3)
    max_tokens = 4 if state == "preempted" else 20
    before_b = {"a": [1] * 4} | ({"x": [4] * 2, "y": [5] * 2} if state == "waiting" else {})
    for name, prompt in before_b.items():
        engine.add_request(name, prompt, params(max_tokens))
    engine.add_request("b", [2] * 6, params(max_tokens))
    engine.add_request("c", [3] * 3, params(4))
    step(engine)
    if state in ("running", "preempted"):
        step(engine)
    (seq,) = engine.requests["b"]
    assert {
        "waiting": seq in engine.scheduler.waiting and seq.num_tokens == 6,
        "mid-prefill": seq in engine.scheduler.running and seq.num_computed_tokens == 2,
        "running": seq in engine.scheduler.running and seq.num_uncomputed_tokens == 1,
        "preempted": seq in engine.scheduler.waiting and seq.num_tokens == 7,
    }[state]
    return engine


@pytest.mark.parametrize("state", STATES)
def test_abort_frees_everything_at_once(checkpoint, state):
    engine = engine_with_b(checkpoint, state)
    (seq,), num_free = engine.requests["b"], engine.kv_cache_manager.num_free_blocks
    num_held = len(seq.block_table)
    output = engine.abort_request("b")
    assert output.finished and reason(output) == "abort" and output.error is None
    assert answer(output) == answer_alone([2] * 6, seq.num_tokens - 6), "it keeps its tokens"
    assert engine.kv_cache_manager.num_free_blocks == num_free + num_held and seq.block_table == []
    assert "b" not in engine.requests
    assert_whole(engine)


@pytest.mark.parametrize("state", STATES)
def test_repeated_or_unknown_abort_is_harmless(checkpoint, state):
    engine = engine_with_b(checkpoint, state)
    engine.abort_request("b")
    for request_id in ("b", "nobody"):
        assert engine.abort_request(request_id) is None
        assert_whole(engine)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_steps", range(6))
def test_prompt_that_was_aborted_half_way_is_served_to_the_next(checkpoint, num_steps, is_async):
    """It takes 5 steps of 4 tokens. What was computed of it is hit, and the rest, which has blocks too, is not."""
    prompt = [*range(1, 20)]
    engine = scripted_engine(checkpoint, num_blocks=12, max_num_batched_tokens=4, async_scheduling=is_async)
    engine.add_request("a", prompt, params(3))
    for _ in range(num_steps):
        step(engine)
    assert engine.abort_request("a") is not None
    num_computed = 4 * max(0, num_steps - is_async)
    for name in "bc":
        engine.add_request(name, prompt, params(3))
    ended = run_to_the_end(engine)
    assert [answer(ended[name]) for name in "bc"] == [answer_alone(prompt, 3)] * 2
    assert ended["b"].num_cached_tokens == min(16, num_computed)


def test_abort_does_not_scan_other_requests(checkpoint, monkeypatch):
    """Aborting is fast even in a queue of a thousand."""
    engine = scripted_engine(checkpoint, num_blocks=4, max_num_seqs=1)
    for i in range(1000):
        engine.add_request(str(i), [1, 2], params(2))
    looks = []
    monkeypatch.setattr(Sequence, "__eq__", lambda a, b: looks.append(1) or a is b)
    monkeypatch.setattr(Sequence, "__hash__", object.__hash__)
    assert reason(engine.abort_request("500")) == "abort"
    assert sum(looks) == 0 and len(engine.scheduler.waiting) == 999


def test_abort_shows_text_that_was_held_back(scripted):
    """No tokens will follow, so "ab" can no longer become the stop string."""
    engine = scripted(byte_ids("abc")).llm_engine
    engine.add_request("a", [1], params(3, stop="abc"))
    assert [output.outputs[0].text for _ in range(2) for output in engine.step()] == ["", ""]
    output = engine.abort_request("a")
    assert output.outputs[0].text == "ab" and output.metrics.finished_time >= output.metrics.first_token_time


# Preemption


def test_preempted_sequence_computes_its_prompt_and_output_again(checkpoint):
    """Request b has 3 tokens and has sampled 5 when a needs its block: of 8 tokens, 7 were computed before."""
    engine = scripted_engine(checkpoint, num_blocks=4, enable_prefix_caching=False)
    engine.add_request("a", [1] * 3, params(9)), engine.add_request("b", [2] * 3, params(9))
    ended = run_to_the_end(engine)
    assert engine.scheduler.num_preemptions == 1
    steps = engine.executor.steps
    assert steps[0] == [("a", 3), ("b", 3)] and steps[1:6] == [[("a", 1), ("b", 1)]] * 5
    assert steps[6:9] == [[("a", 1)]] * 3, "a has 9 tokens in 3 blocks, and gets 3 more"
    assert steps[9:] == [[("b", 9)], [("b", 1)], [("b", 1)]]
    assert engine.executor.num_tokens == (3 + 8) + (3 + 5) + 9 + 2
    assert answer(ended["a"]) == answer_alone([1] * 3, 9) and answer(ended["b"]) == answer_alone([2] * 3, 9)


# Cleanup


@pytest.mark.parametrize("way", ["ended", "aborted", "failed"])
def test_nothing_remains_of_a_request(checkpoint, way):
    """However it ended, no part of the engine refers to it."""
    engine = scripted_engine(checkpoint, num_blocks=4)
    engine.add_request("a", [1] * 3, params(40 if way == "failed" else 3))
    seq = weakref.ref(engine.requests["a"][0])
    for _ in range(2):
        step(engine)
    if way == "aborted":
        engine.abort_request("a")
    run_to_the_end(engine)
    assert seq() is None


# A step that raises


class Unreliable:
    """The `run` of an executor, which raises for the requests that are `poisoned`, or for all."""

    def __init__(self, engine: LLMEngine) -> None:
        self._run = executor_of(engine).run
        self.poisoned: set[str] = set()
        self.is_dead = self.is_small = False
        self.tried: list[str] = []  # the requests in each run
        executor_of(engine).run = self  # type: ignore[assignment, method-assign]

    def __call__(self, batch: Batch) -> list[SampledToken | None]:
        names = [seq.request_id for seq, _ in batch]
        self.tried.append("".join(names))
        if self.is_dead:
            raise RuntimeError("the device is gone")
        if self.is_small and len(batch) > 1:
            raise MemoryError("too much at once")
        if self.poisoned & set(names):
            raise ValueError(f"one of {len(batch)} is poisoned")
        return self._run(batch)


@pytest.mark.parametrize("name", "abc")
def test_request_that_raises_ends_alone_and_others_get_their_token_in_the_same_step(checkpoint, name):
    engine = scripted_engine(checkpoint, num_blocks=20)
    runner = Unreliable(engine)
    for i, other in enumerate("abc"):
        engine.add_request(other, [i + 1] * 3, params(6))
    step(engine), step(engine)
    runner.poisoned.add(name)
    outputs = step(engine)
    assert runner.tried == ["abc", "abc", "abc", "a", "b", "c"]
    poisoned = outputs.pop(name)
    assert poisoned.finished and reason(poisoned) == "error" and poisoned.error == "ValueError: one of 1 is poisoned"
    assert answer(poisoned) == answer_alone(poisoned.prompt_token_ids, 2), "it keeps its tokens"
    assert [len(answer(output)) for output in outputs.values()] == [3, 3]
    for output in run_to_the_end(engine).values():
        assert answer(output) == answer_alone(output.prompt_token_ids, 6) and output.error is None


@pytest.mark.parametrize("num_steps", [0, 1])
def test_prompt_that_raises_ends_whole_or_in_chunks(checkpoint, num_steps):
    """Request b's first or second chunk raises."""
    engine = scripted_engine(checkpoint, num_blocks=20, max_num_batched_tokens=6)
    engine.add_request("a", [1] * 3, params(4)), engine.add_request("b", [2] * 9, params(4))
    runner = Unreliable(engine)
    for _ in range(num_steps):
        step(engine)
    runner.poisoned.add("b")
    outputs = step(engine)
    assert outputs["b"].error == "ValueError: one of 1 is poisoned" and answer(outputs["b"]) == []
    assert answer(run_to_the_end(engine)["a"]) == answer_alone([1] * 3, 4)


def test_lost_device_ends_all_requests_with_errors(checkpoint):
    """Two requests run and three wait for seats, which they get, with an error, in the following steps."""
    engine = scripted_engine(checkpoint, num_blocks=20, max_num_seqs=2)
    runner = Unreliable(engine)
    for name in "abcde":
        engine.add_request(name, [1, 2], params(9))
    step(engine)
    runner.is_dead = True
    assert [sorted(step(engine)) for _ in range(3)] == [["a", "b"], ["c", "d"], ["e"]]
    assert runner.tried == ["ab", "ab", "a", "b", "cd", "c", "d", "e"]
    assert_empty(engine)
    runner.is_dead = False
    engine.add_request("f", [1, 2], params(2))
    assert answer(run_to_the_end(engine)["f"]) == answer_alone([1, 2], 2), "the engine is unchanged"


@pytest.fixture
def busy(checkpoint) -> LLMEngine:
    """Return an engine with requests of all kinds, one of which outgrows the pool."""
    engine = scripted_engine(checkpoint, num_blocks=8, max_num_batched_tokens=7, max_num_seqs=4)
    for i, (num_prompt_tokens, max_tokens) in enumerate([(5, 40), (9, 6), (1, 8), (12, 9), (4, 1), (3, 12)]):
        engine.add_request(str(i), [i + 1] * num_prompt_tokens, params(max_tokens))
    return engine


def test_step_that_is_too_large_is_run_one_by_one_and_loses_nothing(busy):
    """In every step, each request gets its tokens or its error, as if nothing had happened."""
    runner = Unreliable(busy)
    runner.is_small = True
    ended = run_to_the_end(busy)
    assert busy.scheduler.num_preemptions > 0 and max(map(len, runner.tried)) > 2
    assert [reason(ended[str(i)]) for i in range(6)] == ["error"] + ["length"] * 5
    for output in ended.values():
        assert answer(output) == answer_alone(output.prompt_token_ids, len(answer(output)))
    assert [len(answer(ended[str(i)])) for i in range(6)] == [32 - 5 + 1, 6, 8, 9, 1, 12]


def test_failed_request_is_returned_although_the_model_raises(checkpoint):
    """Request a outgrows the pool in the step in which b's prompt is too much for the model."""
    engine = scripted_engine(checkpoint, num_blocks=2)
    runner = Unreliable(engine)
    engine.add_request("a", [1] * 8, params(9)), engine.add_request("b", [2] * 3, params(2))
    step(engine)
    runner.is_dead = True
    assert list(step(engine)) == ["a", "b"]
    assert runner.tried == ["a", "b"]
    assert_empty(engine)


def test_request_that_failed_in_a_failed_step_is_returned_by_the_next(checkpoint, monkeypatch):
    """Request a outgrows the pool, and then a copy for the samples of b raises."""
    engine = scripted_engine(checkpoint, num_blocks=4)
    engine.add_request("a", [1] * 16, params(9)), step(engine)
    engine.add_request("b", [2] * 6, params(2, n=2, temperature=1.0, seed=1, skip_reading_prefix_cache=True))

    def fails(copies):
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "_take", lambda seq, output: fails([]))
        with pytest.raises(RuntimeError, match="device lost"):
            step(engine)
    assert_whole(engine)
    assert engine.has_unfinished_requests() and not engine.scheduler.running
    outputs = step(engine)
    assert reason(outputs["a"]) == "error" and outputs["a"].finished
    ended = run_to_the_end(engine)
    assert list(ended) == ["b"] and reason(ended["b"]) == "length"


def fail_in_observer(engine: LLMEngine, kind: str) -> None:
    """Run a step in which an observer raises at the first event of this kind."""

    class Broken:
        def fail(self, *details: object) -> None:
            raise RuntimeError("broken observer")

    observer = Broken()
    setattr(observer, f"on_{kind}", observer.fail)
    engine.observers.append(observer)
    with pytest.raises(RuntimeError, match="broken observer"):
        engine.step()
    engine.observers.remove(observer)
    assert_whole(engine)


@pytest.mark.parametrize("kind", ["step", "finish", "end"])
def test_ended_request_does_not_run_again_although_an_observer_raises(checkpoint, kind):
    """It has its last token and keeps no block. A request that continues loses none."""
    engine = scripted_engine(checkpoint, num_blocks=20)
    for name, max_tokens in {"a": 2, "b": 4}.items():
        engine.add_request(name, [1, 2, 3], params(max_tokens))
    step(engine)
    fail_in_observer(engine, kind)
    assert [seq.request_id for seq in engine.scheduler.running] == ["b"]
    ended = run_to_the_end(engine)
    assert answer(ended["b"]) == answer_alone([1, 2, 3], 4)
    if kind != "end":
        assert answer(ended["a"]) == answer_alone([1, 2, 3], 2), "the next step returns it"


@pytest.mark.parametrize("is_followed", [False, True])
def test_request_that_ended_in_a_failed_step_can_be_aborted(checkpoint, is_followed):
    """The abort returns its output. The next step returns that of b, and of a new a if there is one."""
    engine = scripted_engine(checkpoint, num_blocks=20)
    for name, max_tokens in {"a": 2, "b": 4}.items():
        engine.add_request(name, [1, 2, 3], params(max_tokens))
    step(engine)
    fail_in_observer(engine, "step")
    output = engine.abort_request("a")
    assert (answer(output), reason(output)) == (answer_alone([1, 2, 3], 2), "length")
    assert_whole(engine)
    expected = {"b": answer_alone([1, 2, 3], 4)}
    if is_followed:
        engine.add_request("a", [9, 9], params(3))
        assert list(step(engine)) == ["b", "a"]
        expected["a"] = answer_alone([9, 9], 3)
    assert {name: answer(output) for name, output in run_to_the_end(engine).items()} == expected


@pytest.mark.parametrize("when", ["before", "after"])
def test_token_that_cannot_be_appended_is_computed_again(checkpoint, monkeypatch, when):
    engine = scripted_engine(checkpoint, num_blocks=20)
    for name in "ab":
        engine.add_request(name, [1, 2, 3], params(6))
    step(engine)
    append_token = Sequence.append_token

    def fails(seq: Sequence, token: SampledToken) -> None:
        if when == "after":
            append_token(seq, token)
        raise RuntimeError("no text")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no text"):
        patch.setattr(Sequence, "append_token", fails)
        engine.step()
    assert_whole(engine)
    ended = run_to_the_end(engine)
    assert [answer(ended[name]) for name in "ab"] == [answer_alone([1, 2, 3], 6)] * 2


def test_request_that_cannot_be_decoded_does_not_affect_the_others(checkpoint, monkeypatch):
    """All three end in the same step, which raises, and the next step returns the others."""
    engine = scripted_engine(checkpoint, num_blocks=20)
    for name in "abc":
        engine.add_request(name, [1, 2, 3], params(2))
    step(engine)
    completion = Sequence.completion

    def decoded(seq: Sequence) -> CompletionOutput:
        if seq.request_id == "b":
            raise RuntimeError("no text")
        return completion(seq)

    monkeypatch.setattr(Sequence, "completion", decoded)
    with pytest.raises(RuntimeError, match="no text"):
        engine.step()
    assert_whole(engine)
    assert list(engine.step()) != [] and not engine.has_unfinished_requests()
    assert_empty(engine)


def test_aborted_request_that_cannot_be_decoded_leaks_nothing(checkpoint, monkeypatch):
    engine = scripted_engine(checkpoint, num_blocks=20)
    engine.add_request("a", [1, 2, 3], params(4))
    step(engine)
    monkeypatch.setattr(Sequence, "completion", lambda seq: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.abort_request("a")
    assert_empty(engine)


def test_reset_is_not_interrupted(checkpoint, monkeypatch):
    """Press Ctrl-C while a sequence moves between queues."""
    engine = scripted_engine(checkpoint, num_blocks=20)
    engine.add_request("a", [1] * 3, params(4)), step(engine)
    preempt_all = engine.scheduler.preempt_all

    def pressed() -> None:
        [seq] = engine.scheduler.running
        engine.scheduler.running.clear()
        signal.raise_signal(signal.SIGINT)
        engine.scheduler.running.append(seq)
        preempt_all()

    monkeypatch.setattr(engine.scheduler, "preempt_all", pressed)
    with pytest.raises(KeyboardInterrupt):
        engine.reset_prefix_cache(reset_running_requests=True)
    assert len(engine.scheduler.waiting) == 1
    assert answer(run_to_the_end(engine)["a"]) == answer_alone([1] * 3, 4)


# Ctrl-C


def test_ctrl_c_before_any_line_of_the_engine_keeps_it_intact(checkpoint):
    """Two requests arrive, b is preempted, c arrives and is aborted: each call takes effect fully or not at all."""

    def drive(engine: LLMEngine) -> None:
        engine.add_request("a", [1] * 3, params(9)), engine.add_request("b", [2] * 3, params(9))
        for _ in range(7):
            engine.step()
        engine.add_request("c", [3] * 3, params(9))
        engine.step()
        engine.abort_request("c")

    places = each_line(drive, scripted_engine(checkpoint, num_blocks=4))[::29]
    assert len(places) > 25
    for place in places:
        engine = scripted_engine(checkpoint, num_blocks=4)
        with pytest.raises(KeyboardInterrupt):
            lines_run(drive, engine, press_at=place)
        assert_whole(engine)
        for output in run_to_the_end(engine).values():
            assert answer(output) == answer_alone(output.prompt_token_ids, 9)
