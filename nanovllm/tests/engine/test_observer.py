"""Observers: the events that an engine reports and their order. Observing an engine changes nothing."""

import sys
import threading
from collections import Counter
from typing import Any

import pytest

from ...engine.observer import Observer, Observers
from ...engine.scheduler import SchedulerOutput
from ...engine.sequence import Sequence
from ...llm_engine import LLMEngine
from ...options.config import EngineConfig
from ..testing.engines import (
    ScriptedExecutor,
    answer_alone,
    answers,
    chooser,
    params,
    run_to_the_end,
    scripted_engine,
    step,
)
from .test_offload_engine import FIRST, SECOND, engine_of

KINDS = (
    *("add", "refuse", "wait", "admit", "fork", "grow", "schedule", "preempt", "free", "finish", "abort", "step"),
    *("raise", "begin", "end", "cache", "evict", "copy", "store", "renew", "host_evict", "load", "arrive"),
)


class Recorder:
    """An observer that records all events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, tuple[Any, ...]]] = []
        for kind in KINDS:
            setattr(self, f"on_{kind}", lambda *details, kind=kind: self.events.append((kind, details)))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [details for each, details in self.events if each == kind]


def recorded(engine: LLMEngine) -> Recorder:
    recorder = Recorder()
    engine.observers.append(recorder)
    return recorder


# The list of observers


def test_observer_receives_only_events_it_has_a_method_for():
    heard: list[tuple[object, ...]] = []

    class Listener:
        def on_admit(self, *details: object) -> None:
            heard.append(details)

    observers = Observers(Listener(), Observer())
    observers.tell("admit", 1, 2), observers.tell("free", 3), observers.tell("admit")
    assert heard == [(1, 2), ()]


def test_observers_are_called_in_the_order_they_were_added_until_removed():
    heard: list[str] = []

    class Listener:
        def __init__(self, name: str) -> None:
            self.on_begin = lambda: heard.append(name)

    a, b = Listener("a"), Listener("b")
    observers = Observers(a)
    observers.append(b)
    observers.tell("begin")
    observers.remove(a)
    observers.tell("begin")
    assert heard == ["a", "b", "b"] and list(observers) == [b] and len(observers) == 1
    with pytest.raises(ValueError):
        observers.remove(a)


def test_observer_may_remove_itself_during_an_event():
    heard: list[str] = []

    class Once:
        def on_begin(self) -> None:
            heard.append("once")
            observers.remove(self)

    class Always:
        def on_begin(self) -> None:
            heard.append("always")

    observers = Observers(Once(), Always())
    observers.tell("begin"), observers.tell("begin")
    assert heard == ["once", "always", "always"]


def test_observer_with_tell_receives_every_event_in_its_turn():
    heard: list[tuple[object, ...]] = []

    class Listener:
        def on_admit(self, *details: object) -> None:
            heard.append(("a listener", *details))

    class Everything(Observer):
        def tell(self, kind: str, *details: object) -> None:
            heard.append((kind, *details))

    everything = Everything()
    observers = Observers(Listener(), everything, Listener())
    observers.tell("admit", 1), observers.tell("free", 2, 3)
    assert heard == [("a listener", 1), ("admit", 1), ("a listener", 1), ("free", 2, 3)]
    observers.remove(everything)
    observers.tell("free", 4)
    assert len(heard) == 4


def test_object_without_methods_is_not_an_observer():
    observers = Observers()
    with pytest.raises(ValueError, match="got 5"):
        observers.append(5)
    assert len(observers) == 0


def test_no_observer_is_lost_when_threads_append_at_once():
    observers = Observers()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=lambda: [observers.append(Observer()) for _ in range(100)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(observers) == 400


def test_default_observer_ignores_everything():
    assert Observer().tell("admit", 1, 2) is None


# The events of an engine


def test_events_of_a_request_from_arrival_to_end(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=8)
    recorder = recorded(engine)
    engine.add_request("a", [1, 2, 3], params(3))
    run_to_the_end(engine)
    assert recorder.kinds == [
        *("add", "begin", "admit", "schedule", "step", "end"),
        *("begin", "schedule", "cache", "step", "end"),
        *("begin", "grow", "schedule", "step", "free", "finish", "end"),
    ]
    [(seq,)] = recorder.of("add")
    assert isinstance(seq, Sequence) and recorder.of("admit") == [(seq, [])] and recorder.of("grow") == [(seq, None)]
    assert recorder.of("free") == [(seq, [0, 1])] and recorder.of("finish") == [(seq,)]
    assert recorder.of("end") == [(None,)] * 3
    output = recorder.of("schedule")[0][0]
    assert isinstance(output, SchedulerOutput) and output.batch == [(seq, 3)]
    assert recorder.of("step")[0] == ([(seq, 3)], [seq])


def test_events_of_samples_that_fork_copy_and_finish(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=16)
    recorder = recorded(engine)
    engine.add_request("a", [1] * 6, params(3, n=3, temperature=1.0, seed=3))
    samples = engine.requests["a"]
    run_to_the_end(engine)
    assert recorder.of("add") == [(samples[0],)]
    assert recorder.of("fork") == [(samples[0], samples[1]), (samples[0], samples[2])]
    assert [len(copies) for (copies,) in recorder.of("copy")] == [2]
    copied = [copy for _, copy in recorder.of("grow") if copy]
    assert copied == recorder.of("copy")[0][0]
    assert Counter(seq for (seq,) in recorder.of("finish")) == Counter(samples)


def test_events_of_refused_waiting_preempted_and_aborted_requests(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=4, max_num_seqs=2)
    recorder = recorded(engine)
    with pytest.raises(ValueError):
        engine.add_request("x", [1] * 40, params(3))
    assert [request_id for request_id, _ in recorder.of("refuse")] == ["x"] and recorder.kinds == ["refuse"]
    for request_id, prompt, options in (("y", 5, {}), ("z", [1], {"priority": 1}), (7, [1], {})):
        with pytest.raises(ValueError) as caught:
            engine.add_request(request_id, prompt, params(1), **options)
        assert recorder.events.pop() == ("refuse", (str(request_id), str(caught.value)))
    for name in ("a", "b", "c"):
        engine.add_request(name, [ord(name)] * 4, params(9))
    (a, *_), (b, *_), (c, *_) = engine.requests.values()
    step(engine)
    assert recorder.of("wait") == [(c, "seat", 1, 0)]
    while not recorder.of("preempt"):
        step(engine)
    assert recorder.of("preempt") == [(b, a)]
    step(engine)
    assert recorder.of("wait")[-1] == (b, "blocks", 3, 1)
    engine.abort_request("c")
    assert recorder.kinds[-2:] == ["abort", "finish"] and recorder.of("finish")[-1] == (c,)
    run_to_the_end(engine)
    assert Counter(seq for (seq,) in recorder.of("finish")) == Counter([a, b, c])


def test_step_that_fails_before_the_fork_ends_each_sample_once(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=16, max_num_batched_tokens=4)
    recorder = recorded(engine)
    engine.add_request("a", [1] * 9, params(3, n=3, temperature=1.0, seed=3))
    samples = engine.requests["a"]
    error = RuntimeError("out of memory")

    def run(batch):
        raise error

    engine.executor.run = run
    run_to_the_end(engine)
    assert [each for _, each in recorder.of("raise")] == [error]
    assert Counter(seq for (seq,) in recorder.of("finish")) == Counter(samples)


def test_end_event_of_a_failed_step_carries_the_error(checkpoint, monkeypatch):
    engine = scripted_engine(checkpoint, num_blocks=16)
    recorder = recorded(engine)
    engine.add_request("a", [1] * 6, params(3, n=2, temperature=1.0, seed=3)), step(engine)
    error = RuntimeError("device lost")

    def fails(copies):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine.kv_cache, "copy_blocks", fails)
        with pytest.raises(RuntimeError):
            engine.step()
    assert recorder.of("end") == [(None,), (error,)]
    assert [makes_room_for for _, makes_room_for in recorder.of("preempt")] == [None, None]
    run_to_the_end(engine)


def test_events_of_stored_and_loaded_blocks(checkpoint):
    engine = engine_of(checkpoint, num_blocks=8)
    recorder = recorded(engine)
    for name, prompt in (("a", FIRST), ("b", SECOND)):
        engine.add_request(name, prompt, params(12, temperature=1.0, seed=3))
    run_to_the_end(engine)
    assert len(recorder.of("store")) == engine.host_tier.num_blocks_stored > 0
    loaded = [copies for _, copies in recorder.of("load")]
    assert sum(map(len, loaded)) == engine.host_tier.num_blocks_loaded > 0
    assert [copies for (copies,) in recorder.of("arrive")] == loaded
    cached: dict[int, bytes] = {}
    for kind, details in recorder.events:
        if kind == "cache":
            block, block_hash = details
            assert block not in cached
            cached[block] = block_hash
        elif kind == "evict":
            block, block_hash, why = details
            assert cached.pop(block) == block_hash and why == "taken"
    assert cached == engine.kv_cache_manager.pool.hashes
    assert engine.reset_prefix_cache()
    assert {details[-1] for details in recorder.of("host_evict")[-3:]} == {"reset"}
    assert recorder.of("evict")[-1][-1] == "reset"


def test_observer_can_be_passed_to_the_constructor(checkpoint):
    recorder = Recorder()
    config = EngineConfig(str(checkpoint), kv_cache_tokens=64, offload_policy="recompute", skip_tokenizer_init=True)
    engine = LLMEngine(config, observers=[recorder], choose_executor=chooser(ScriptedExecutor))
    engine.add_request("a", [1, 2], params(1))
    run_to_the_end(engine)
    assert recorder.kinds[0] == "add"


def test_observing_changes_nothing(checkpoint):
    results = []
    for is_recorded in (False, True):
        engine = scripted_engine(checkpoint, num_blocks=9, max_num_batched_tokens=7)
        if is_recorded:
            recorded(engine)
        for i in range(5):
            engine.add_request(str(i), [i + 1] * (3 + i), params(9, n=1 + i % 3, temperature=1.0, seed=3))
        results.append({name: answers(output) for name, output in run_to_the_end(engine).items()})
        assert engine.scheduler.num_preemptions > 0
    assert results[0] == results[1]
    assert results[0]["4"] == [answer_alone([5] * 7, 9, 3, i) for i in range(2)]
