"""Requests come and go at any time: add_request, step, abort_request; and LLM on top of them."""

import pytest

from ..llm import LLM
from ..observer import Observer
from ..sampling import SamplingParams
from .scripted import add, check, reason, run, scripted_engine, step, tokens_alone, tokens_of


def test_a_request_joins_others_in_the_middle_of_their_outputs(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=16)
    first = add(engine, "a", 5)
    step(engine)
    second = add(engine, "b", 3)
    step(engine)
    assert engine.model_runner.steps[1] == [("a", 1), ("b", 3)]
    outputs = run(engine)
    assert [tokens_of(outputs[name]) for name in "ab"] == [tokens_alone(prompt, 8) for prompt in (first, second)]


def test_a_request_that_ends_makes_room_in_the_next_step(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=16, max_num_seqs=1)
    add(engine, "a", 5, max_tokens=1)
    add(engine, "b", 3)
    assert [list(step(engine)) for _ in range(2)] == [["a"], ["b"]]


def test_a_step_returns_the_output_so_far_of_each_request_with_a_new_token(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=16, max_num_batched_tokens=6)
    prompt = add(engine, "a", 4, max_tokens=2)
    add(engine, "b", 9)
    outputs = [step(engine) for _ in range(3)]
    assert [list(each) for each in outputs] == [["a"], ["a"], ["b"]]
    assert [(tokens_of(each["a"]), each["a"].finished) for each in outputs[:2]] == [
        (tokens_alone(prompt, 1), False),
        (tokens_alone(prompt, 2), True),
    ]


def test_a_step_without_requests_does_nothing(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=4)
    assert not engine.has_unfinished_requests() and step(engine) == {} and engine.model_runner.steps == []


def test_a_request_id_can_be_used_again_only_after_its_request_has_finished(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=4)
    add(engine, "a", 3)
    with pytest.raises(ValueError, match="a"):
        add(engine, "a", 5)
    assert len(tokens_of(run(engine)["a"])) == 8
    add(engine, "a", 5)
    assert len(tokens_of(run(engine)["a"])) == 8


@pytest.mark.parametrize("prompt", [[], "", [7] * 64, [320], [-1]], ids=str)
def test_a_request_that_cannot_be_served_ends_with_an_error_in_the_next_step(checkpoint, prompt):
    engine = scripted_engine(checkpoint, num_blocks=16)
    add(engine, "a", 3)
    engine.add_request("bad", prompt)
    output = step(engine)["bad"]
    assert output.finished and (reason(output), tokens_of(output)) == ("error", []) and output.error
    assert list(run(engine)) == ["a"]


def test_an_aborted_request_returns_its_output_so_far_and_frees_its_blocks(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=4)
    prompt = add(engine, "a", 5)
    step(engine)
    output = engine.abort_request("a")
    assert (reason(output), tokens_of(output), output.finished) == ("abort", tokens_alone(prompt, 1), True)
    assert run(engine) == {}


def test_a_request_can_be_aborted_when_waiting_preempted_or_refused(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=4)
    for name in "abc":
        add(engine, name, 7)
    for _ in range(3):
        step(engine)
    engine.add_request("bad", [])
    assert engine.scheduler.num_preemptions == 1
    assert [reason(engine.abort_request(name)) for name in ("b", "c", "bad")] == ["abort", "abort", "error"]
    check(engine)
    assert list(run(engine)) == ["a"]


def test_abort_of_an_unknown_request_returns_none(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=4)
    add(engine, "a", 3, max_tokens=1)
    run(engine)
    assert engine.abort_request("a") is None and engine.abort_request("b") is None


def test_an_observer_hears_of_an_abort_while_the_request_holds_its_blocks(checkpoint):
    heard: list[tuple[object, int]] = []

    class Recorder(Observer):
        def tell(self, kind: str, *details: object) -> None:
            if kind == "abort":
                heard.append((details[0], engine.kv_cache_manager.num_free_blocks))

    engine = scripted_engine(checkpoint, num_blocks=4)
    engine.observer = Recorder()
    add(engine, "a", 5)
    step(engine)
    engine.abort_request("a")
    engine.abort_request("a")
    assert heard == [("a", 2)]


def test_an_observer_follows_a_request_from_its_arrival_to_its_end(checkpoint):
    events = []

    class Recorder(Observer):
        def tell(self, kind: str, *details: object) -> None:
            events.append(kind)

    LLM(checkpoint, Recorder(), block_size=4).generate([1, 5, 6], SamplingParams(max_tokens=3, ignore_eos=True))
    kinds = [kind for kind in events if kind in ("add", "admit", "grow", "step", "free", "finish")]
    assert kinds == ["add", "admit", "step", "step", "grow", "step", "free", "finish"]
