"""Standard streams, Ctrl-C, and the lines about a run that commands print on standard error."""

import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from threading import Event
from typing import TYPE_CHECKING

from ..log import tell

if TYPE_CHECKING:
    from ..engine.kv_cache import PoolReport
    from ..llm import LLM

INTERRUPTED_STATUS = 130  # a shell's exit status for a command that Ctrl-C has ended
MAX_PROMPT_CHARACTERS = 1 << 24
MAX_COMPILE_SECONDS = 120  # to wait for at the end of a run

# Standard streams


def open_closed_streams() -> None:
    """Replace each closed standard stream with the null device."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def replace_unprintable() -> None:
    """Print `?` for characters that the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def dim(text: str) -> str:
    """Return text that appears dimmed if standard error is a terminal that supports it."""
    is_plain = not sys.stderr.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return text if is_plain else f"\x1b[2m{text}\x1b[0m"


def read_prompt(file: str) -> str:
    """Return the text of a file, or of standard input for `-`, without trailing newlines.

    Raise ValueError for a file that is not text, or too long for a prompt (/dev/zero never ends). Raise OSError for a
    file that cannot be read.
    """
    with nullcontext(sys.stdin) if file == "-" else open(file, encoding="utf-8") as stream:
        name = "standard input" if file == "-" else file
        try:
            text = stream.read(MAX_PROMPT_CHARACTERS + 1)
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise ValueError(f"{name} is not {error.encoding} text: invalid byte {byte:#04x}") from None
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise ValueError(f"{name} has more than {MAX_PROMPT_CHARACTERS:,} characters: too long for a prompt")
    return text.rstrip("\n")


# Ctrl-C ends a command immediately, unless there is something to clean up first.


def exit_immediately(*_: object) -> None:
    """Handle SIGINT by exiting while nothing needs cleanup: in imports, model loading, file reading and measurements.

    In such code, a KeyboardInterrupt could turn into another error, or into a traceback that Python prints and ignores.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # print only one line
    with suppress(OSError):
        os.write(2, b"\ninterrupted\n" if os.isatty(2) else b"interrupted\n")  # a terminal has echoed ^C
    os._exit(INTERRUPTED_STATUS)


def raise_once(*_: object) -> None:
    """Raise KeyboardInterrupt on the first SIGINT, and exit immediately on the second."""
    signal.signal(signal.SIGINT, exit_immediately)
    raise KeyboardInterrupt


def tell_interrupted(line: str = "interrupted", is_after_key: bool = True) -> None:
    """Print why the command ends. From then on, Ctrl-C exits without printing another line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tell(line, is_after_key)
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED_STATUS))


@contextmanager
def signal_handled_by(handler: Callable[..., None], signal_number: int = signal.SIGINT) -> Iterator[None]:
    """Handle a signal, by default SIGINT, with `handler` in the block."""
    previous_handler = signal.signal(signal_number, handler)
    try:
        yield
    finally:
        signal.signal(signal_number, previous_handler)


def ctrl_c_raises() -> AbstractContextManager[None]:
    """Raise KeyboardInterrupt on Ctrl-C in the block, which has files to close."""
    return signal_handled_by(raise_once)


@contextmanager
def ctrl_c_sets_event() -> Iterator[Event]:
    """Set the event on the first Ctrl-C, so that the current step finishes. Raise KeyboardInterrupt on the second."""

    def on_first_press(*_: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, raise_once)

    interrupted = Event()
    with signal_handled_by(on_first_press):
        yield interrupted


def sigterm_exits() -> AbstractContextManager[None]:
    """Exit on SIGTERM in the block, in which a server starts. By default, process 1 of a container ignores SIGTERM."""
    return signal_handled_by(lambda *_: os._exit(0), signal.SIGTERM)


# Lines about a run


class StatsPrinter:
    """A printer of the engine's state, which prints a line on standard error at regular intervals."""

    def __init__(self, llm: "LLM", seconds: float | None) -> None:
        """Print a line every `seconds` seconds, or nothing if `seconds` is None."""
        self._llm, self._seconds, self._next_time = llm, seconds, time.perf_counter()

    def print_if_due(self) -> None:
        """Print a line if the interval has passed. Commands call this between steps."""
        if self._seconds is None or time.perf_counter() < self._next_time:
            return
        from tqdm import tqdm

        self._next_time = time.perf_counter() + self._seconds
        with suppress(OSError):  # a closed standard error does not stop the run
            tqdm.write(str(self._llm.stats()), file=sys.stderr)  # above a progress bar, if there is one


def pool_line(pool: "PoolReport") -> str:
    """Return how much of the KV cache was reserved and used at the peak of a run."""
    used_share = pool.used / max(pool.held, 1)
    slots = f"{pool.held:,} of {pool.num_slots:,} reserved, {pool.used:,} used ({used_share:.0%})"
    return f"KV slots: {slots} |{pool.strip(32)}|"


def finish_compiling(llm: "LLM") -> None:
    """Wait for kernels that this run started to compile: if it ended now, the next run would compile them again.

    Wait for at most MAX_COMPILE_SECONDS. Ctrl-C ends the wait.
    """
    with suppress(KeyboardInterrupt), ctrl_c_raises():
        llm.llm_engine.kernels.wait(MAX_COMPILE_SECONDS)
