"""Workers that share a step: each phase is split into tasks, and the next free worker takes the next task.

The calling thread is the first worker. It goes through all phases, and does every task that no helper takes. Helpers
are threads that join a step when they see it. So a step never waits for a thread that has no core to run on, only for
threads that have started a task. In contrast, a library's parallel loop starts and ends with all of its threads: next
to one busy process, each of the 150 loops of a step waits for the slowest thread.

Each phase has a counter word, which holds the step's number and the number of tasks taken. A late helper, still in a
step that has ended, sees another step's number there and takes no task.
"""

import os
from collections.abc import Iterator
from typing import Any

from numba import types

from .layout import STRIDE
from .vectors import Memory, intrinsic, kernel, put

SHIFT = 24  # bits of the word that hold the next task; the bits above hold the step, and 2**39 steps take years
SPINS = 20_000  # loads of a counter before a worker yields its core: about 20 us
YIELDS = 200  # yields before a helper goes to sleep

yield_core = types.ExternalFunction("SwitchToThread" if os.name == "nt" else "sched_yield", types.int32())


@intrinsic(lambda memory, i: types.int64(memory, types.intp))
def load_acquire(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return memory[i]. All writes before the store_release() that set this number are then visible."""
    return builder.load_atomic(builder.gep(args[0], [args[1]]), "acquire", 8)


@intrinsic(lambda memory, i, number: types.void(memory, types.intp, types.int64))
def store_release(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Set memory[i] to `number` after all earlier writes are visible."""
    builder.store_atomic(args[2], builder.gep(args[0], [args[1]]), "release", 8)
    return context.get_dummy_value()


@intrinsic(lambda memory, i, number: types.int64(memory, types.intp, types.int64))
def atomic_add(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Add `number` to memory[i], and return its earlier value."""
    return builder.atomic_rmw("add", builder.gep(args[0], [args[1]]), args[2], "acq_rel")


@intrinsic(lambda memory, i, before, after: types.boolean(memory, types.intp, types.int64, types.int64))
def compare_and_swap(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Set memory[i] to `after` if it equals `before`, and return whether it did."""
    at = builder.gep(args[0], [args[1]])
    return builder.extract_value(builder.cmpxchg(at, args[2], args[3], "acq_rel", "acquire"), 1)


@kernel
def open_phases(counters: Memory, count: int, step: int) -> None:
    """Close the previous step, and offer all tasks of this step's `count` phases."""
    for phase in range(count):
        store_release(counters, phase * STRIDE, step << SHIFT)
        put(counters, phase * STRIDE + 1, 0)


@kernel
def take_task(counters: Memory, phase: int, step: int, count: int) -> int:
    """Return the next task of a phase, or -1 if all are taken or the step is over."""
    while True:
        word = load_acquire(counters, phase * STRIDE)
        task: int = word & ((1 << SHIFT) - 1)
        if word >> SHIFT != step or task >= count:
            return -1
        if compare_and_swap(counters, phase * STRIDE, word, word + 1):
            return task


@kernel
def tasks(counters: Memory, phase: int, step: int, count: int) -> Iterator[int]:
    """Yield the tasks of a phase that this worker takes. Return when all tasks are finished, or the step is over."""
    task = take_task(counters, phase, step, count)
    while task >= 0:
        yield task
        atomic_add(counters, phase * STRIDE + 1, 1)
        task = take_task(counters, phase, step, count)
    spins = 0
    while (
        load_acquire(counters, phase * STRIDE + 1) < count and load_acquire(counters, phase * STRIDE) >> SHIFT == step
    ):
        spins += 1
        if spins % SPINS == 0:
            yield_core()


@kernel
def wait_for_step(mailbox: Memory, seen: int) -> int:
    """Return the number of a step newer than `seen`, or `seen` if none comes within a few milliseconds."""
    for spins in range(1, YIELDS * SPINS):
        number: int = load_acquire(mailbox, 0)
        if number != seen:
            return number
        if spins % SPINS == 0:
            yield_core()
    return seen
