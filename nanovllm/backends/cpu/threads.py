"""Numba's threads: as many as torch has, and the same ones where both can share OpenMP's."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import torch


@cache
def start_team() -> str:
    """Choose the threading layer, once in a process: OpenMP, which torch has loaded already, or else Numba's own.

    A layer that the user has named, or that runs already, stays, and so does torch's number of threads. Returns its
    name.
    """
    import numba
    from numba.core import config

    started_in()
    with suppress(ValueError):
        return numba.threading_layer()  # raises it if none runs
    before, threads = config.THREADING_LAYER, torch.get_num_threads()
    for layer in [before] if before != "default" else ["omp", "workqueue"]:
        config.THREADING_LAYER = layer
        try:
            numba.get_num_threads()  # starts it
        except ValueError:
            continue
        finally:
            config.THREADING_LAYER = before
        torch.set_num_threads(threads)  # one OpenMP serves both: Numba has just told it to use all cores
        return numba.threading_layer()
    raise ImportError(f"Numba has no threading layer {before!r}")


@cache
def started_in() -> int:
    """Return the process that the threads belong to."""
    return os.getpid()


def is_forked() -> bool:
    """Return whether this process was forked from that of the threads: OpenMP's end a child that uses them."""
    return bool(started_in.cache_info().currsize) and started_in() != os.getpid()


@cache
def turns() -> Any:
    """Return the lock of parallel loops. Numba's own layer ends the process if two threads use it at once."""
    return threading.RLock() if start_team() == "workqueue" else nullcontext()


@contextmanager
def numba_threads() -> Iterator[int]:
    """Run parallel loops of this thread with as many threads as torch has. Then restore the number."""
    import numba

    count = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    with turns():
        before = numba.get_num_threads()
        numba.set_num_threads(count)
        try:
            yield count
        finally:
            numba.set_num_threads(before)
