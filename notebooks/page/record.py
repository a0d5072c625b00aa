"""Record the workload on a stage: the snapshot and the events, the same on every run."""

import io
from typing import Any

from nanovllm.trace import traced
from notebooks.page.workload import build, serve

Event = dict[str, Any]
TIMES = ("seconds", "began")  # of the clock on the wall: another one in each run


def record(name: str) -> list[Event]:
    """The events of stage `name` ("s1"), the snapshot first."""
    events: list[Event] = []
    llm = build(name)
    with traced(llm, events.append) as observer:
        serve(name, llm, observer)
    return [{key: value for key, value in event.items() if key not in TIMES} for event in events]
