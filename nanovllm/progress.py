"""The time of the engine's last progress, in memory that another process reads to detect a stuck engine."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_double

_clock = time.monotonic
_last = c_double(math.inf)  # time of the last progress, on a clock that processes share; inf while none is due


def share_progress(last: c_double, clock: Callable[[], float] = time.monotonic) -> None:
    """Report this process's progress in `last`, in memory that processes share."""
    global _last, _clock
    _last, _clock = last, clock


def note_progress() -> None:
    """Report progress: a message was handled, or a step was computed (or, with plain operations, one of its layers)."""
    _last.value = _clock()


@contextmanager
def no_progress_due() -> Iterator[None]:
    """Suspend the check in a block, however long it takes, because the engine waits for work or for a compiler."""
    _last.value = math.inf
    try:
        yield
    finally:
        note_progress()
