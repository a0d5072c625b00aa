"""A history under a trace: after each step the events alone, replayed, must give the state that the engine is in."""

import tempfile
from pathlib import Path
from typing import Any

from nanovllm.tests.twin import Twin
from nanovllm.trace import Tracer, traced
from nanovllm.trace.events import Event
from tests.history import History
from tests.plans import Plan
from tests.scripted_llm import Stage


def play_traced(stage: Stage, plan: Plan, num_before: int = 0) -> list[Event]:
    """Return the events of a history. Its first `num_before` happenings are not traced."""
    with tempfile.TemporaryDirectory() as folder:
        history, tracer = History(stage, plan.knobs, Path(folder)), Tracer()
        count = history.observer.tell

        def tell(kind: str, *details: Any) -> None:
            count(kind, *details)
            tracer.tell(kind, *details)

        history.observer.tell = tell
        for happening in plan.events[:num_before]:
            history.apply(happening)
        twin = Twin(history.llm, tracer)
        with traced(history.llm, twin, tracer):
            for happening in plan.events[num_before:]:
                history.apply(happening)
                twin.compare()
                if tracer.error:
                    break  # it is raised at the end
            else:
                history.finish()
        return twin.events
