"""Workers that share a step: each phase is cut into pieces, and whoever is free takes the next one.

The thread that calls a step is its first worker. It goes through all phases, and would do all pieces if nobody else
came. Helpers are threads that join a step when they see it. So nothing waits for a thread that the system has given no
core, but for one that has taken a piece and not yet finished it. A library's parallel loop begins and ends with all of
its threads: beside one busy process, each of 150 loops a step waits for the slowest.

A phase has a word that says which step it belongs to and how many of its pieces are taken. A helper that comes late,
from a step that has ended, finds another step's number there and takes nothing.
"""

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from numba import njit, types
from numba.core.extending import intrinsic

from .vectors import OPTIONS, Memory, put

STRIDE = 8  # int64 of a phase, a cache line: the word, and how many pieces are done
SHIFT = 24  # of a step's number in the word: below it stands the next piece. 2**39 steps take years
PATIENCE = 20_000  # looks at a counter before a worker offers its core to somebody else: about 20 us
NAPS = 200  # so often does a helper offer it; then it sleeps until it is called

yield_core = types.ExternalFunction("SwitchToThread" if os.name == "nt" else "sched_yield", types.int32())


@intrinsic
def look(typing: Any, memory: Any, i: Any) -> Any:
    """memory[i], and then all that was written before it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.gep(args[0], [args[1]]), "acquire", 8)

    return types.int64(memory, types.intp), generate


@intrinsic
def show(typing: Any, memory: Any, i: Any, number: Any) -> Any:
    """memory[i] = number, after all that was written before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], builder.gep(args[0], [args[1]]), "release", 8)
        return context.get_dummy_value()

    return types.void(memory, types.intp, types.int64), generate


@intrinsic
def add_atomically(typing: Any, memory: Any, i: Any, number: Any) -> Any:
    """memory[i] += number; returns what was there before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.gep(args[0], [args[1]]), args[2], "acq_rel")

    return types.int64(memory, types.intp, types.int64), generate


@intrinsic
def swap(typing: Any, memory: Any, i: Any, before: Any, after: Any) -> Any:
    """memory[i] = after, if it is `before`; returns whether it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.gep(args[0], [args[1]])
        return builder.extract_value(builder.cmpxchg(at, args[2], args[3], "acq_rel", "acquire"), 1)

    return types.boolean(memory, types.intp, types.int64, types.int64), generate


@njit(**OPTIONS)
def open_phases(counters: Memory, count: int, step: int) -> None:
    """Close the step before and open this one: all pieces of `count` phases are there to be taken."""
    for phase in range(count):
        show(counters, phase * STRIDE, step << SHIFT)
        put(counters, phase * STRIDE + 1, 0)


@njit(**OPTIONS)
def take(counters: Memory, phase: int, step: int, count: int) -> int:
    """Return the next piece of a phase, or -1 if there is none, or the step is over."""
    while True:
        word = look(counters, phase * STRIDE)
        piece = word & ((1 << SHIFT) - 1)
        if word >> SHIFT != step or piece >= count:
            return -1
        if swap(counters, phase * STRIDE, word, word + 1):
            return piece


@njit(**OPTIONS)
def pieces(counters: Memory, phase: int, step: int, count: int) -> Iterator[int]:
    """Yield the pieces of a phase that this worker gets. End when all of them are done, whoever did them."""
    piece = take(counters, phase, step, count)
    while piece >= 0:
        yield piece
        add_atomically(counters, phase * STRIDE + 1, 1)
        piece = take(counters, phase, step, count)
    looks = 0
    while look(counters, phase * STRIDE + 1) < count and look(counters, phase * STRIDE) >> SHIFT == step:
        looks += 1
        if looks % PATIENCE == 0:
            yield_core()


@njit(**OPTIONS)
def wait_for_step(mailbox: Memory, seen: int) -> int:
    """Return the number of a step newer than `seen`, or `seen` if none comes for about a millisecond."""
    for looks in range(1, NAPS * PATIENCE):
        number = look(mailbox, 0)
        if number != seen:
            return number
        if looks % PATIENCE == 0:
            yield_core()
    return seen


class Helpers:
    """Threads that take part in steps while there are some, and sleep when there are none. They end with the owner."""

    def __init__(self, count: int, help: Callable[[int, int], int]) -> None:
        """help(worker, seen): take part in the steps after `seen` until none comes for a while; return the last one.

        It must not hold the owner of the helpers.
        """
        self._shared = shared = Shared([SimpleQueue() for _ in range(count)])
        SHARED[:] = [each for each in SHARED if not each.threads or any(map(threading.Thread.is_alive, each.threads))]
        SHARED.append(shared)
        weakref.finalize(self, shared.end)  # also if the system has no thread left for the second one
        for worker, bell in enumerate(shared.bells, 1):
            arguments = worker, help, bell, shared
            thread = threading.Thread(target=stand_by, args=arguments, daemon=True, name=f"helper {worker}")
            thread.start()
            shared.threads.append(thread)

    def call(self) -> int:
        """Call the helpers to a step. Returns its number: 1, 2, ..."""
        shared = self._shared
        shared.newest += 1
        if shared.is_asleep:
            shared.wake()
        return shared.newest


@dataclass(eq=False)
class Shared:
    """The state that helpers share with their owner."""

    bells: list[SimpleQueue[None]]  # of each helper: a garbage collector may ring it, in any thread, at any moment
    newest: int = 0  # the number of the newest step
    is_asleep: bool = False  # whether a helper is
    is_over: bool = False
    threads: list[threading.Thread] = field(default_factory=list)
    process: int = field(default_factory=os.getpid)  # whose threads they are

    def wake(self) -> None:
        self.is_asleep = False
        for bell in self.bells:
            if bell.empty():
                bell.put(None)

    def end(self) -> None:
        """In a forked child there are no helpers."""
        self.is_over = True
        if self.process == os.getpid():
            self.wake()


def stand_by(worker: int, help: Callable[[int, int], int], bell: SimpleQueue[None], shared: Shared) -> None:
    seen = 0
    while not shared.is_over:
        newest = shared.newest
        seen = help(worker, seen)
        shared.is_asleep = True
        if shared.newest in (newest, seen) and not shared.is_over:  # it may have been called, and never come
            bell.get()


SHARED: list[Shared] = []  # also of owners that are gone: their helpers may be at their last line


@atexit.register
def end_all() -> None:
    """End all helpers. One that leaves a kernel, or frees a tensor, without an interpreter ends the process."""
    for shared in list(SHARED):
        shared.end()
        for thread in shared.threads:
            thread.join(timeout=5)
