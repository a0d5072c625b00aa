"""Helpers: threads that take part in the steps of an engine. team.py is what they do there."""

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue


class Helpers:
    """Threads that take part in steps, and sleep when there are none. They end when this object is freed."""

    def __init__(self, count: int, help: Callable[[int, int], int]) -> None:
        """Start `count` threads that call help(worker, seen).

        `help` takes part in all steps after number `seen` until none comes for a while, and returns the number of the
        last one. It must not hold a reference to this object, which could then never be freed.
        """
        self._shared = shared = Shared([SimpleQueue() for _ in range(count)])
        SHARED[:] = [each for each in SHARED if not each.threads or any(map(threading.Thread.is_alive, each.threads))]
        SHARED.append(shared)
        weakref.finalize(self, shared.end)  # before the threads start, because that may fail
        for worker, wakeup in enumerate(shared.wakeups, 1):
            arguments = worker, help, wakeup, shared
            thread = threading.Thread(target=run_helper, args=arguments, daemon=True, name=f"helper {worker}")
            thread.start()
            shared.threads.append(thread)

    def start_step(self) -> int:
        """Wake the helpers for a new step, and return its number: 1, 2, ..."""
        shared = self._shared
        shared.newest += 1
        if shared.is_asleep:
            shared.wake()
        return shared.newest


@dataclass(eq=False)
class Shared:
    """The state that helpers share with their owner."""

    wakeups: list[SimpleQueue[None]]  # one per helper; the garbage collector may call put() in any thread, at any time
    newest: int = 0  # number of the newest step
    is_asleep: bool = False  # True if any helper may be asleep
    is_over: bool = False
    threads: list[threading.Thread] = field(default_factory=list)
    process: int = field(default_factory=os.getpid)  # id of the process that has the threads

    def wake(self) -> None:
        self.is_asleep = False
        for wakeup in self.wakeups:
            if wakeup.empty():
                wakeup.put(None)

    def end(self) -> None:
        """End the helpers. A forked child has none."""
        self.is_over = True
        if self.process == os.getpid():
            self.wake()


def run_helper(worker: int, help: Callable[[int, int], int], wakeup: SimpleQueue[None], shared: Shared) -> None:
    """Take part in steps, and sleep whenever none has come for a while."""
    seen = 0
    while not shared.is_over:
        newest = shared.newest
        seen = help(worker, seen)
        shared.is_asleep = True
        if shared.newest in (newest, seen) and not shared.is_over:  # unless a step was started in the meantime
            wakeup.get()


SHARED: list[Shared] = []  # kept while threads run, even after their Helpers object is freed


@atexit.register
def end_all() -> None:
    """End all helpers.

    A helper that returns from a kernel or frees a tensor after the interpreter has exited would crash the process.
    """
    for shared in list(SHARED):
        shared.end()
        for thread in shared.threads:
            thread.join(timeout=5)
