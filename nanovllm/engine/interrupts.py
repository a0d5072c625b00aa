"""Ctrl-C is taken between two steps: in the middle of one it would lose slots, or leave a token half appended."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class BetweenSteps:
    """`with between_steps:` is where Ctrl-C has its usual effect: a press that was held back takes effect first."""

    def __init__(self) -> None:
        # Only the main thread gets signals. None: the handler is not Python's, and could not be put back.
        is_main = threading.current_thread() is threading.main_thread()
        self._can_hold = is_main and signal.getsignal(signal.SIGINT) is not None
        self._handler: Any = None  # the program's own, while ours is in its place
        self._is_pressed = False

    def hold_back(self) -> None:
        if self._can_hold:
            self._handler = signal.signal(signal.SIGINT, self._note)

    def let_through(self) -> None:
        """Do what the program does on Ctrl-C, if it was pressed."""
        if self._can_hold:
            signal.signal(signal.SIGINT, self._handler)
        if self._is_pressed:
            self._is_pressed = False
            signal.raise_signal(signal.SIGINT)

    def _note(self, *_: Any) -> None:
        self._is_pressed = True

    def __enter__(self) -> None:
        try:
            self.let_through()
        except BaseException:  # it ends the caller's block: a second press must not break into what that still does
            self.hold_back()
            raise

    def __exit__(self, *_: Any) -> None:
        self.hold_back()


@contextmanager
def interrupts_held_back() -> Iterator[BetweenSteps]:
    """Hold Ctrl-C back until the block ends, except in `with` on the yielded object. Other threads have no Ctrl-C."""
    between_steps = BetweenSteps()
    between_steps.hold_back()
    try:
        yield between_steps
    finally:
        between_steps.let_through()
