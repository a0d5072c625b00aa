"""The trace: what an engine does, as events. It observes an engine of any stage, or the package's, from outside.

    with traced(llm, "run.jsonl"):
        llm.generate(prompts)

EVENTS.md    the format: each kind of event, and its keys
events.py    the same as data; a file of events is written and read
hooks.py     methods are wrapped on their objects, and restored
observer.py  what all engines have in common: sequences, their tokens, steps
pools.py     a pool of blocks, on the device and on the host
batches.py   stages 1 to 3, which serve static batches
engines.py   from stage 4 on, which have a scheduler
managers.py  and their manager: tables, forks, the prefix cache, two tiers
snapshot.py  the state that the first line holds
replay.py    State and apply(): the events alone give each step's tables, counts and queues
hidden.py    the same events without the texts
watch.py     the events of a server's engine, while somebody looks
chrome.py    for chrome://tracing and ui.perfetto.dev
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .events import FileSink, read_trace
from .replay import State, apply, states

if TYPE_CHECKING:
    from .observer import Observer

__all__ = ["State", "apply", "read_trace", "states", "traced"]

Sink = str | Path | Callable[[dict[str, Any]], object]  # a file, or what is called with each event


@contextmanager
def traced(llm: Any, sink: Sink) -> Iterator["Observer"]:
    """Write what `llm`, an LLM or an LLMEngine, does in the block to `sink`. Nothing is left in it afterwards.

    A sink that fails ends the trace, not the run: what it raised is raised when the block has ended. Raises ValueError
    if `llm` is no engine, is traced already, or has an open stream of static batches; OSError for a file that cannot be
    written.
    """
    from .observer import observe  # it imports the engine, and torch with it: to read a trace needs neither

    with nullcontext(sink) if callable(sink) else FileSink(sink) as write:
        observer = observe(llm, write)
        try:
            yield observer
        finally:
            observer.close()
    if observer.error:
        raise observer.error
