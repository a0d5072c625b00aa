"""Trace a workload on one engine in a process of its own, because a learner's code may loop forever or crash.

    python -m notebooks.page.worker s3 exercises/s3 events.jsonl page Scheduler.schedule Scheduler._may_admit

The workload is "page" or "traps". The last arguments are the functions of the stage's exercise. Each line of the file
is an event, with `function`, the innermost of these functions that was running, and `told`, what the observer was told:
"taken" comes from tell("grow", ...). A crash adds a last line, {"crash": ...}, with the place in the code, and
`ran`: the functions of the exercise that ran last.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import FrameType, FunctionType
from typing import IO, Any, NamedTuple

from nanovllm.trace import Tracer
from nanovllm.trace.events import Event
from nanovllm.trace.tracer import error_text
from notebooks.page.record import MAX_STEPS, THE_PAGES, serve
from notebooks.page.traps import TRAPS

MAX_RAN = 3  # functions that ran last
SECONDS = int(os.environ.get("SECONDS_FOR_A_STEP", "20"))  # of the processor: half-written code may loop forever


class Place(NamedTuple):
    """A line of code, and the function that it is in."""

    file: str
    line: int
    function: str


class Sink:
    """A file of events that names the exercise's function behind each of them."""

    def __init__(self, file: IO[str], folder: Path, functions: Collection[str]) -> None:
        self._file, self._folder, self._functions = file, folder, functions
        self.ran: dict[str, None] = {}  # the exercise's functions, in the order in which they ended last

    def __call__(self, event: Event) -> None:
        if is_cleaning_up():
            return
        frames = [*frames_above(sys._getframe())]
        self.write(event | {"function": self._innermost(frames), "told": told_in(frames)})
        if event["kind"] == "step":
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            if event["step"] == 2 * MAX_STEPS:  # this run has parted from the stage's long ago
                os._exit(0)

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, default=plain) + "\n")
        self._file.flush()  # whatever happens next

    def _innermost(self, frames: Iterable[FrameType]) -> str | None:
        names = ((name_of(frame), frame) for frame in frames)
        return next((name for name, frame in names if name in self._functions and is_in(frame, self._folder)), None)

    def crash(self, error: BaseException) -> None:
        """Write a crash: the error, its place in the folder, and the last function of the exercise on the way there.

        If the tracer raised it, `told` is what it was told.
        """
        while not (places := list(places_of(error, self._folder))) and error.__context__:
            error = error.__context__
        functions = [place.function for place in places if place.function in self._functions]
        place = places[-1]._asdict() if places else None
        words = f"SyntaxError: {error.msg}" if isinstance(error, SyntaxError) else error_text(error)
        told = told_in(frame for frame, _ in traceback.walk_tb(error.__traceback__))
        ran = [*reversed(self.ran)][:MAX_RAN]
        function = functions[-1] if functions else None
        self.write({"crash": words, "place": place, "function": function, "told": told, "ran": ran})


def plain(value: Any) -> int | str:
    """Return a value that JSON does not know: a block may be a tensor with one number."""
    return int(value) if hasattr(value, "__index__") else repr(value)


def is_cleaning_up() -> bool:
    """Return True while LLM._serve() frees everything after an error: the engine has crashed already."""
    error = sys.exception()
    return bool(error and error.__traceback__ and error.__traceback__.tb_frame.f_code.co_name == "_serve")


def frames_above(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, the innermost first."""
    while frame:
        yield frame
        frame = frame.f_back


def told_in(frames: Iterable[FrameType]) -> str | None:
    """Return what kind of event the tracer is being told, or None if it isn't being told any."""
    return next((frame.f_locals["kind"] for frame in frames if frame.f_code is Tracer.tell.__code__), None)


def places_of(error: BaseException, folder: Path) -> Iterator[Place]:
    """Yield the lines below `folder` that an error came through, the innermost last."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_in(frame, folder):
            yield Place(relative(frame.f_code.co_filename, folder), line, name_of(frame))
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_relative_to(folder):
        yield Place(relative(error.filename, folder), error.lineno or 1, "")


def relative(file: str, folder: Path) -> str:
    return Path(file).relative_to(folder).as_posix()


def is_in(frame: FrameType, folder: Path) -> bool:
    return frame.f_code.co_filename.startswith(f"{folder}{os.sep}")


def name_of(frame: FrameType) -> str:
    return frame.f_code.co_qualname.partition(".<locals>")[0]


def note_runs(package: str, functions: Collection[str], ran: dict[str, None]) -> None:
    """Wrap these functions wherever a module of `package` has them: one that ends moves to the end of `ran`."""

    def noting(name: str, function: FunctionType) -> Callable[..., Any]:
        @wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            finally:
                ran.pop(name, None)
                ran[name] = None

        return noted

    for module in [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]:
        for name in functions:
            of, _, attribute = name.rpartition(".")
            owner = getattr(module, of, None) if of else module
            function = vars(owner).get(attribute) if owner else None
            if isinstance(function, FunctionType) and not hasattr(function, "__wrapped__"):
                setattr(owner, attribute, noting(name, function))


def time_out(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"no step has ended for {SECONDS} seconds: is there an infinite loop?")


def main(name: str, path: str, target: str, workload: str, *functions: str) -> None:
    folder = Path(path).resolve()
    sys.path.insert(0, str(folder.parents[1]))
    signal.signal(signal.SIGPROF, time_out)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    with open(target, "w", encoding="utf-8") as file:
        sink = Sink(file, folder, functions)
        try:
            engine = import_module(f"{folder.parent.name}.{folder.name}")
            note_runs(engine.__name__, functions, sink.ran)
            serve(name, engine, sink, Tracer(), THE_PAGES if workload == "page" else TRAPS[name])
        except Exception as error:
            sink.crash(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
