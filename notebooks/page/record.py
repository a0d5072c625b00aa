"""Record the workload on a stage, and look at it step by step: the same on every run."""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nanovllm.trace import State, Tracer, apply, traced
from nanovllm.trace.replay import begin
from notebooks.page.workload import build, serve

Event = dict[str, Any]
TIMES = ("seconds", "began")  # of the clock on the wall: another one in each run


def record(name: str) -> list[Event]:
    """Return the events of stage `name` ("s1"), the snapshot first."""
    events: list[Event] = []
    tracer = Tracer()
    llm = build(name, tracer)
    with traced(llm, events.append, tracer):
        serve(name, llm)
    return list(renumbered({key: value for key, value in event.items() if key not in TIMES} for event in events))


def renumbered(events: Iterable[Event]) -> Iterator[Event]:
    """Yield events. One between two steps, such as an arrival, gets the number of the step that follows.

    >>> [event["step"] for event in renumbered([{"kind": "arrive", "step": 0}, {"kind": "step", "step": 1}])]
    [1, 1]
    """
    waiting: list[Event] = []
    for event in events:
        waiting.append(event)
        if event["kind"] in ("snapshot", "step"):
            yield from ({**each, "step": event["step"]} for each in waiting)
            waiting = []


@dataclass(frozen=True)
class Step:
    """What happened in a step, and the states around it."""

    number: int
    events: list[Event]
    before: State
    after: State

    def of(self, kind: str, **fields: Any) -> list[Event]:
        """Its events of a kind, with these values in them."""
        return [e for e in self.events if e["kind"] == kind and all(e[key] == fields[key] for key in fields)]


class Run:
    """A recorded run, step by step: `for step in run.steps: ...`"""

    def __init__(self, events: list[Event]) -> None:
        self.events = events

    @cached_property
    def steps(self) -> list[Step]:
        return list(self._steps())

    def _steps(self) -> Iterator[Step]:
        snapshot, *rest = self.events
        state, events = begin(snapshot), list[Event]()
        before = deepcopy(state)
        for event in rest:
            apply(state, event)
            events.append(event)
            if event["kind"] == "step":
                after = deepcopy(state)
                yield Step(event["step"], events, before, after)
                before, events = after, []


def label(seq: str) -> str:
    """What the page calls a sequence.

    >>> label("A"), label("F.0")
    ('A', 'F1')
    """
    request, _, sample = seq.partition(".")
    return f"{request}{int(sample) + 1}" if sample else request
