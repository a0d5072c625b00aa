"""Ctrl-C is taken between two steps: in the middle of one it would lose slots, or leave a token half appended."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Ctrl-C takes effect when the block ends, as a KeyboardInterrupt or whatever else the program does on it.

    Only the main thread gets signals: in another one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = threading.Event()
    handler = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pressed.is_set():
        signal.raise_signal(signal.SIGINT)
