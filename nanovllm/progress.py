"""The time of the engine's last progress, in memory that another process reads to detect a stuck engine."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_double

_clock = time.monotonic
_last_progress = c_double(math.inf)  # a time, on a clock that processes share; inf suspends the check


def share_progress(last_progress: c_double, clock: Callable[[], float] = time.monotonic) -> None:
    """Store the time of progress in `last_progress` from now on, memory shared with the process that checks it."""
    global _last_progress, _clock
    _last_progress, _clock = last_progress, clock


def note_progress() -> None:
    """Report progress: the engine handled a message, or computed a step or (with plain operations) a layer."""
    _last_progress.value = _clock()


@contextmanager
def no_progress_due() -> Iterator[None]:
    """Suspend the check during the block, which may take a long time: the engine waits for work or for a compiler."""
    _last_progress.value = math.inf
    try:
        yield
    finally:
        note_progress()
