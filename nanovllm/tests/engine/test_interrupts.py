"""Ctrl-C ends a call between two steps, leaks no block, and then runs the program's own handler."""

import contextlib
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from ... import llm as llm_module
from ...engine import core
from ...engine.interrupts import interrupts_held_back
from ...llm import LLM
from ...requests.sampling_params import SamplingParams
from ..testing.engines import model_runner

FOLDERS = {os.path.dirname(llm_module.__file__), os.path.dirname(core.__file__)}
pytestmark = pytest.mark.filterwarnings("ignore:.*requests were not served")
PROMPTS = [[1, 5, 9], [], [1, 300, 301, 302, 303], [1, 44]]  # the second prompt is refused
PARAMS = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 1, 1, 2)]
SCRIPT = [11, 12, 13]


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def llm(scripted: Callable[[list[int]], LLM]) -> LLM:
    llm = scripted(SCRIPT)
    generate(llm)  # the first call of an engine runs other lines: it sets the peak
    return llm


def generate(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    assert [output.outputs[0].token_ids for output in outputs] == [SCRIPT, [], SCRIPT[:1], SCRIPT[:2]]


def close_half_way(llm: LLM) -> None:
    with contextlib.closing(llm.stream(PROMPTS, PARAMS)) as stream:
        for _ in range(4):
            next(stream)


WAYS = {"a call": generate, "a stream that is closed": close_half_way}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


Place = tuple[str, int, int]  # a line of a file, and how often it ran before


def lines_run(way: Callable[[Any], None], llm: Any, press_at: Place | None = None) -> list[Place]:
    """Run a function and press Ctrl-C before that line of the engine's files. Return the lines that were run."""
    places: list[Place] = []
    counts: Counter[tuple[str, int]] = Counter()

    def trace(frame: FrameType, event: str, _: object) -> Callable | None:
        file = frame.f_code.co_filename
        if os.path.dirname(file) not in FOLDERS:
            return None
        if event == "line":
            line = (file, frame.f_lineno)
            places.append((*line, counts[line]))
            counts[line] += 1
            if places[-1] == press_at:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        way(llm)
    finally:
        sys.settrace(before)
    return places


def each_line(way: Callable[[Any], None], llm: Any) -> list[Place]:
    """Return the first, the second and the last time that each line runs."""
    lasts = {(file, line): count for file, line, count in lines_run(way, llm)}
    places = [(*line, count) for line, last in lasts.items() for count in sorted({0, min(last, 1), last})]
    assert len(places) > 300
    return places


def assert_as_new(llm: LLM) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    llm.llm_engine.kv_cache_manager.check_integrity()
    assert llm.llm_engine.kv_cache_manager.report().held == 0
    generate(llm)


@pytest.mark.full
@each_way
def test_ctrl_c_before_any_line_ends_the_call_and_leaks_nothing(llm, way):
    way(llm)  # the first event of a kind runs other lines: an observer's method is looked up
    for place in each_line(way, llm)[::23]:
        with pytest.raises(KeyboardInterrupt) as caught:  # the error keeps all frames of the call
            lines_run(way, llm, press_at=place)
        assert_as_new(llm)
        del caught


@pytest.mark.full
def test_program_that_continues_gets_all_its_tokens(llm):
    """Its handler notes the press, once, and raises nothing."""
    presses: list[int] = []

    def note(number: int, _: object) -> None:
        presses.append(number)

    signal.signal(signal.SIGINT, note)
    generate(llm)
    for place in each_line(generate, llm)[::29]:
        lines_run(generate, llm, press_at=place)
        assert presses == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is note
        presses.clear()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert_as_new(llm)


def press_in_step(llm: LLM, number: int) -> list[int]:
    """Press Ctrl-C while the model runs for that time. Return a list that receives the batch size of each step."""
    runner, steps = model_runner(llm.llm_engine), []
    run = runner.run

    def pressed(batch):
        steps.append(len(batch))
        if len(steps) == number:
            signal.raise_signal(signal.SIGINT)
        return run(batch)

    runner.run = pressed  # type: ignore[method-assign]
    return steps


def test_step_is_not_interrupted_and_no_further_one_begins(llm):
    steps = press_in_step(llm, 2)
    with pytest.raises(KeyboardInterrupt):
        generate(llm)
    assert steps == [3, 2]
    assert_as_new(llm)


def test_ctrl_c_is_not_lost_when_a_step_raises(llm, monkeypatch):
    def run(batch):
        signal.raise_signal(signal.SIGINT)
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.llm_engine.executor, "run", run)
        generate(llm)
    assert_as_new(llm)


def test_ctrl_c_between_outputs_of_a_stream_takes_effect_at_once(llm):
    stream = llm.stream(PROMPTS, PARAMS)
    for _ in stream:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert_as_new(llm)


def test_nothing_is_held_back_in_other_threads(scripted):
    """Only the main thread may set handlers, and only it receives signals."""
    seen = []

    def work() -> None:
        llm = scripted(SCRIPT)
        press_in_step(llm, -1)
        generate(llm)
        seen.append(signal.getsignal(signal.SIGINT))
        assert_as_new(llm)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_handler_from_outside_python_is_left_alone(llm, monkeypatch):
    """A C program that runs Python may have one, and Python could not restore it."""
    monkeypatch.setattr(signal, "getsignal", lambda _: None)
    monkeypatch.setattr(signal, "signal", lambda *_: pytest.fail("its handler was taken away"))
    generate(llm)
    monkeypatch.undo()


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_handler_that_is_no_function_is_left_alone(llm, monkeypatch, handler):
    """There is nothing to delay: the system ignores Ctrl-C, or ends the process."""
    signal.signal(signal.SIGINT, handler)
    monkeypatch.setattr(signal, "signal", lambda *_: pytest.fail("its handler was taken away"))
    generate(llm)


def test_handler_is_replaced_once_for_a_call_and_its_steps(llm, monkeypatch):
    swaps, swap = [], signal.signal
    monkeypatch.setattr(signal, "signal", lambda *arguments: (swaps.append(arguments), swap(*arguments))[1])
    with interrupts_held_back():
        num_swaps = len(swaps)
        llm.llm_engine.add_request("a", [1, 44], SamplingParams(max_tokens=3, ignore_eos=True))
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
    assert (num_swaps, len(swaps)) == (1, 2)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_press_does_not_interrupt_the_cleanup_of_a_block():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_held_back() as between_steps:
        try:
            signal.raise_signal(signal.SIGINT)
            with between_steps:  # the first press takes effect here
                done.append("not reached")
        finally:
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
