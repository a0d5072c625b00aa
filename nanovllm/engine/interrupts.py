"""Ctrl-C, delayed until a step ends: during a step, it could leak blocks or leave a token half appended."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class BetweenSteps:
    """A gap between steps: in `with between_steps:`, Ctrl-C has its usual effect, even if it was pressed earlier."""

    def __init__(self) -> None:
        # Only the main thread receives signals. A handler that is not a function of Python ignores Ctrl-C, ends the
        # process or could not be restored. One of this class belongs to an outer block, which delays Ctrl-C already.
        handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
        self._can_hold = callable(handler) and not isinstance(getattr(handler, "__self__", None), BetweenSteps)
        self._handler: Any = None  # the program's own handler, while ours replaces it
        self._is_pressed = False

    def hold_back(self) -> None:
        """Delay Ctrl-C from now on."""
        if self._can_hold:
            self._handler = signal.signal(signal.SIGINT, self._on_press)

    def let_through(self) -> None:
        """Restore the program's handler, and call it if Ctrl-C was pressed."""
        if self._can_hold:
            signal.signal(signal.SIGINT, self._handler)
        if self._is_pressed:
            self._is_pressed = False
            signal.raise_signal(signal.SIGINT)

    def _on_press(self, *_: object) -> None:
        self._is_pressed = True

    def __enter__(self) -> None:
        try:
            self.let_through()
        except BaseException:  # `with` ends here: a second Ctrl-C must not interrupt the caller's cleanup
            self.hold_back()
            raise

    def __exit__(self, *_: object) -> None:
        self.hold_back()


@contextmanager
def interrupts_held_back() -> Iterator[BetweenSteps]:
    """Delay Ctrl-C until the block ends, except inside `with` on the yielded object.

    In threads other than the main thread, this does nothing, because they never receive Ctrl-C.
    """
    between_steps = BetweenSteps()
    between_steps.hold_back()
    try:
        yield between_steps
    finally:
        between_steps.let_through()
