"""Compiled code with a diary: of a phase's pieces, who took which, and when; of a step, when each phase began.

A phase is the engine's own tasks() and linear(). A step is the engine's own; another thread looks at its counters.

The clock is the system's, called from compiled code.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import typeof, types

from nanovllm.backends.cpu.matmul import linear
from nanovllm.backends.cpu.team import SHIFT, STRIDE, load_acquire, open_phases, tasks
from nanovllm.backends.cpu.vectors import at, entry, floats, integers, put

MAX_LOOKS = 10**9  # a second or two: then whoever was to be seen will not come
ROWS = 4  # of x
FIELDS = 5  # of a piece in the diary: worker, begin (seconds, nanoseconds), end (the same)
clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.CPointer(types.int64)))


class Piece(NamedTuple):
    number: int
    worker: int  # 0: the thread that called; 1: the helper
    start: float  # microseconds
    end: float


@entry
def open_phase(counters: int) -> None:
    open_phases(integers(counters), 1, 1)


@entry
def wait_for_pieces(counters: int, count: int) -> None:
    """Until so many pieces of the phase have been taken."""
    for _ in range(MAX_LOOKS):
        word = load_acquire(integers(counters), 0)
        if word >> SHIFT == 1 and word - (1 << SHIFT) >= count:
            return


@entry
def take_part(worker: int, counters: int, count: int, weight: int, x: int, size: int, each: int, out: int, diary: int):
    """Addresses: weight float32 [count * each, size]; x [ROWS, size]; out [ROWS, count * each]

    diary int64 [count, FIELDS]
    """
    for piece in tasks(integers(counters), 0, 1, count):
        page = at(integers(diary), piece * FIELDS)
        put(page, 0, worker)
        clock_gettime(0, at(page, 1))
        start, matrix = piece * each, floats(weight)
        linear(matrix, matrix, False, start, start + each, floats(x), size, ROWS, floats(out), count * each)
        clock_gettime(0, at(page, 3))


def quickest(weight: torch.Tensor, count: int, late: int | None, times: int = 9) -> list[Piece]:
    """take_turns(), of some times the quickest: whatever else the machine does can only make it slower."""
    return min((take_turns(weight, count, late) for _ in range(times)), key=lambda found: max(p.end for p in found))


def take_turns(weight: torch.Tensor, count: int, late: int | None) -> list[Piece]:
    """A matrix times ROWS rows in `count` pieces. The helper comes when `late` of them are taken; None: not at all.

    weight float32 [count * each, size]
    """
    x, out = torch.ones(ROWS, weight.shape[1]), torch.zeros(ROWS, len(weight))
    counters, diary = torch.zeros(STRIDE, dtype=torch.int64), torch.zeros(count, FIELDS, dtype=torch.int64)
    given = (counters.data_ptr(), count, weight.data_ptr(), x.data_ptr(), weight.shape[1], len(weight) // count)
    given = (*given, out.data_ptr(), diary.data_ptr())
    take_part.compile(tuple(map(typeof, (0, *given))))
    wait_for_pieces.compile((types.int64, types.int64))

    def help_main() -> None:
        wait_for_pieces(counters.data_ptr(), late)
        take_part(1, *given)

    helper = threading.Thread(target=help_main) if late is not None else None
    if helper:
        helper.start()
        time.sleep(0.002)  # it looks by then
    open_phase(counters.data_ptr())
    take_part(0, *given)
    if helper:
        helper.join()
    expected = weight.sum(1).expand(ROWS, -1)
    assert torch.allclose(out, expected, rtol=1e-3, atol=1e-3), "a piece was left out, or done twice"
    return told(diary.numpy())


def told(diary: np.ndarray) -> list[Piece]:
    """Microseconds from when the first piece was begun. diary int64 [count, FIELDS]

    >>> told(np.array([[0, 7, 999_999_000, 8, 1_000], [1, 8, 0, 8, 3_000]]))[1]
    Piece(number=1, worker=1, start=1.0, end=4.0)
    """
    seconds = diary[:, 1].min()
    starts, ends = (1e6 * (diary[:, i] - seconds) + diary[:, i + 1] / 1e3 for i in (1, 3))
    first = starts.min()
    return [Piece(i, int(diary[i, 0]), float(starts[i] - first), float(ends[i] - first)) for i in range(len(diary))]


# ---- a step, watched


@entry
def watch(counters: int, num_phases: int, step: int, last: int, diary: int) -> None:
    """diary int64 [num_phases + 1, 2]: when each phase's first piece was taken; when the `last` of all was done."""
    words, phase = integers(counters), 0
    for _ in range(MAX_LOOKS):
        if phase < num_phases:
            word = load_acquire(words, phase * STRIDE)
            is_there = word >> SHIFT == step and word != step << SHIFT
        else:
            is_there = load_acquire(words, (num_phases - 1) * STRIDE + 1) == last
        if is_there:
            clock_gettime(0, at(integers(diary), 2 * phase))
            phase += 1
        if phase > num_phases:
            return


def watched(few: Any, run: Callable[[], object]) -> list[float]:
    """Return the microseconds at which the phases of run() began, and its end. run() is a step of the runner `few`."""
    address = few._fixed.work.counters
    counters = next(kept for kept in few._kept if kept.data_ptr() == address).view(-1, STRIDE)
    diary = torch.zeros(len(counters) + 1, 2, dtype=torch.int64)
    given = (address, len(counters), few._helpers._shared.newest + 1, int(counters[-1, 1]), diary.data_ptr())
    watch.compile(tuple(map(typeof, given)))
    watcher = threading.Thread(target=watch, args=given)
    watcher.start()
    time.sleep(0.002)  # it looks by then
    run()
    watcher.join()
    assert diary[:, 0].all(), "the step was not seen"
    return [1e6 * (seconds - int(diary[0, 0])) + part / 1e3 for seconds, part in diary.tolist()]
