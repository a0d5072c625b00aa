"""The time of the engine's last progress, in memory that another process can read to tell whether it is stuck."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_double

_clock = time.monotonic
_last = c_double(math.inf)  # when progress was made, on a clock that processes share; inf while none is due


def share_progress(last: c_double, clock: Callable[[], float] = time.monotonic) -> None:
    """Report this process's progress in `last`, which is memory that processes share."""
    global _last, _clock
    _last, _clock = last, clock


def note_progress() -> None:
    """Report progress: a message was handled, a step was computed, or a layer of one on plain operations."""
    _last.value = _clock()


@contextmanager
def no_progress_due() -> Iterator[None]:
    """Return a context that never counts as stuck, however long it takes: the engine waits for work or a compiler."""
    _last.value = math.inf
    try:
        yield
    finally:
        note_progress()
