"""Workers that share a step: each phase is cut into pieces, and whoever is free takes the next one.

A parallel loop of the library would end, and start again, at each phase: every worker waits for the slowest, 150 times a
step. Here one parallel loop goes through the whole step. Nobody is told which pieces are his: a worker that the system
has taken off its core leaves its pieces to the others. If all pieces are done by one worker, the others find none: it
works with one thread, too, and cannot wait for ever.
"""

from numba import njit, types
from numba.core.extending import intrinsic
from typing import Any

from .vectors import OPTIONS

LINE = 8  # int64 in a cache line: two workers that write to one line take it from each other
TAKEN, DONE = 0, LINE
STRIDE = 2 * LINE  # of a phase's counters
PATIENCE = 20_000  # looks at a counter before a worker offers its core to somebody else

yield_core = types.ExternalFunction("sched_yield", types.int32())


@intrinsic
def add_atomically(typing: Any, memory: Any, i: Any, number: Any) -> Any:
    """memory[i] += number; returns what was there before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.gep(args[0], [args[1]]), args[2], "acq_rel")

    return types.int64(memory, types.intp, types.int64), generate


@intrinsic
def look(typing: Any, memory: Any, i: Any) -> Any:
    """memory[i], after all that its last writer wrote before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.gep(args[0], [args[1]]), "acquire", 8)

    return types.int64(memory, types.intp), generate


@njit(**OPTIONS)
def pieces(counters, phase, count):
    """The pieces of a phase that this worker gets. It ends when all of them are done, whoever did them."""
    at = phase * STRIDE
    piece = add_atomically(counters, at + TAKEN, 1)
    while piece < count:
        yield piece
        add_atomically(counters, at + DONE, 1)
        piece = add_atomically(counters, at + TAKEN, 1)
    looks = 0
    while look(counters, at + DONE) < count:
        looks += 1
        if looks % PATIENCE == 0:
            yield_core()
