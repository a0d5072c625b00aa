"""Watch: the events of a server's engine while its page has viewers, with or without texts."""

import json
import re

import pytest

from ..llm_engine import LLMEngine
from ..options.engine_args import EngineArgs
from ..requests.sampling_params import SamplingParams
from ..trace import apply
from ..trace.events import Event, error_type
from ..trace.replay import State, begin
from ..trace.tracer import Watch

PROMPTS = ["Once upon a time there was a little rabbit.", "The little rabbit and the old fox", "And that is the end"]
WITH_TEXT = {"text", "tokens", "texts", "token"}


@pytest.fixture
def engine(checkpoint) -> LLMEngine:
    args = EngineArgs(model=checkpoint, block_size=4, kv_cache_tokens=96, max_num_seqs=4, offload_policy="load")
    return LLMEngine.from_engine_args(args)


def ask(engine: LLMEngine, name: str, max_tokens: int = 12, n: int = 1) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=3, n=n, ignore_eos=True)
    engine.add_request(name, PROMPTS[len(name) % 3], params)


def steps(engine: LLMEngine, num_steps: int) -> None:
    for _ in range(num_steps):
        engine.step()


def replayed(events: list[Event], state: State | None = None) -> State:
    """Return the state after the events, which pass through JSON as in a feed."""
    for event in json.loads(json.dumps(events)):
        state = begin(event) if event["kind"] == "snapshot" else apply(state, event)
    return state


def assert_same(state: State, engine: LLMEngine) -> None:
    pool, scheduler = engine.kv_cache_manager.pool, engine.scheduler
    tables = {tuple(seq.block_table): seq.num_computed_tokens for seq in scheduler.running}
    assert {
        tuple(seq.block_table): seq.num_computed_tokens for seq in map(state.sequences.get, state.running)
    } == tables
    assert state.free == list(pool.free) and state.ref_counts == pool.ref_counts
    assert sorted(state.cached) == sorted(pool.hashes)
    assert len(state.waiting) == len(scheduler.waiting)


@pytest.mark.parametrize("show_text", [True, False])
def test_viewer_that_joins_while_requests_run_sees_the_engines_state(engine, show_text):
    watch, state = Watch(engine), None
    ask(engine, "a", n=2)
    ask(engine, "bb", max_tokens=20)
    steps(engine, 5)
    watch.on(show_text)
    for step in range(30):
        if step % 6 == 0:
            ask(engine, f"{'c' * (step % 3)}{step}", n=1 + step % 4 // 2)
        if step == 14:
            engine.abort_request(["bb", "12"])
        engine.step()
        state = replayed(watch.take() or [], state)
        assert_same(state, engine)
    assert state.step == 30


def test_second_viewer_starts_with_a_new_snapshot(engine):
    watch = Watch(engine)
    watch.on(True)
    ask(engine, "a")
    steps(engine, 3)
    watch.on(True)
    steps(engine, 2)
    events = watch.take()
    assert [event["kind"] for event in events].count("snapshot") == 1 and events[0]["kind"] == "snapshot"
    assert_same(replayed(events), engine)


def test_nothing_observes_the_engine_without_viewers(engine):
    before = list(engine.observers)
    watch = Watch(engine)
    ask(engine, "a")
    watch.on(False)
    assert len(engine.observers) == len(before) + 1
    steps(engine, 2)
    watch.off()
    assert list(engine.observers) == before
    steps(engine, 2)
    assert watch.take() is None and not watch.has_events


def test_prompts_and_outputs_are_hidden_by_default(engine):
    events = {}
    for show_text in (True, False):
        watch = Watch(engine)
        ask(engine, "earlier")
        engine.step()
        watch.on(show_text)
        ask(engine, f"request-{show_text}")
        with pytest.raises(ValueError, match=r"1,?00\d"):
            engine.add_request("too long", [7] * 1000, SamplingParams())
        while engine.has_unfinished_requests():
            engine.step()
        events[show_text] = watch.take()
        watch.off()
    assert "rabbit" in "".join(each for event in events[True] for each in event.get("texts", []))
    for event in events[False]:
        for key in WITH_TEXT & event.keys():
            assert event[key] is None or set(event[key]) == {None}, event
    hashes = {show: set(re.findall(r"[0-9a-f]{16,}", json.dumps(events[show]))) for show in events}
    assert hashes[True] and hashes[False] and not hashes[True] & hashes[False]
    assert not any(digest.startswith(tuple(hashes[False])) for digest in hashes[True])
    assert [event["why"] for event in events[False] if event["kind"] == "refused"] == ["the request cannot be served"]


def test_only_the_type_of_an_error_is_shown_without_texts():
    assert error_type("ValueError: no words like 'secret'") == "ValueError"
    assert error_type("the secret: it is this") == "error" and error_type(None) is None


def test_error_in_an_event_is_raised(engine, monkeypatch):
    watch = Watch(engine)
    watch.on(True)

    def fail(event: Event) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr(watch._tracer, "_sink", fail)  # noqa: SLF001 - a broken disk
    ask(engine, "a")
    with pytest.raises(RuntimeError, match="disk full"):
        watch.take()
