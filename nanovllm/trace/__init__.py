"""Traces: the events of an engine, either the package's or a stage's.

    with traced(llm, "run.jsonl"):                     # the package's engine accepts observers at any time
        llm.generate(prompts)

    tracer = Tracer()
    llm = LLM(model, observer=tracer)                  # a stage needs its observer from the start
    with traced(llm, "run.jsonl", tracer):
        llm.generate(prompts)

Start with EVENTS.md, which describes the format. events.py lists the events, and reads and writes files. tracer.py is
the observer that records events. replay.py rebuilds the engine's state after each step from the events alone. chrome.py
converts events for chrome://tracing and ui.perfetto.dev.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from .events import FileSink, Sink, read_trace
from .replay import State, apply, states
from .tracer import Tracer

__all__ = ["State", "Tracer", "apply", "read_trace", "states", "traced"]


@contextmanager
def traced(llm: Any, sink: str | Path | Sink, tracer: Tracer | None = None) -> Iterator[Tracer]:
    """Trace `llm`, an LLM or an LLMEngine, within the block. `sink` is a path, or a function that takes an event.

    A stage's LLM must have been built with `tracer` as its observer. If the sink fails, the trace stops, the run goes
    on, and the error is raised at the end of the block. Raise ValueError if `llm` is not an engine, is being traced
    already, or is a stage in the middle of a static batch; and OSError if the file cannot be written.
    """
    tracer = tracer or Tracer()
    with nullcontext(sink) if callable(sink) else FileSink(sink) as write:
        tracer.attach(llm, write)
        try:
            yield tracer
        finally:
            tracer.detach()
    if tracer.error:
        raise tracer.error
