"""The trace: what an engine does, as events. It works for the package's engine and for each of the seven stages.

    with traced(llm, "run.jsonl"):                     # the package's engine takes observers at any time
        llm.generate(prompts)

    tracer = Tracer()
    llm = LLM(model, observer=tracer)                  # a stage's takes its observer when it is made
    with traced(llm, "run.jsonl", tracer):
        llm.generate(prompts)

Start with EVENTS.md, the format. events.py has it as data, and the file; tracer.py is the observer; replay.py gives the
engine's state after each step from the events alone; chrome.py converts them for chrome://tracing and ui.perfetto.dev.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from .events import FileSink, Write, read_trace
from .replay import State, apply, states
from .tracer import Tracer

__all__ = ["State", "Tracer", "apply", "read_trace", "states", "traced"]


@contextmanager
def traced(llm: Any, sink: str | Path | Write, tracer: Tracer | None = None) -> Iterator[Tracer]:
    """Write what `llm`, an LLM or an LLMEngine, does in the block to `sink`: a file, or a function of an event.

    A stage's LLM was made with the `tracer` as its observer. If the sink fails, the trace ends and the run goes on: the
    error is raised at the end of the block. Raise ValueError if `llm` is not an engine, is traced already, or is a
    stage's in the middle of a static batch; OSError for a file that cannot be written.
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
