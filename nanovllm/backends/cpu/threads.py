"""Numba's threads: as many as PyTorch uses, and the same ones if both share an OpenMP runtime."""

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import torch


@cache
def start_threading_layer() -> str:
    """Start a threading layer, once per process, and return its name.

    It prefers OpenMP, which PyTorch has loaded already, then Numba's own layer. A layer that the user has named or that
    already runs is kept, and so is PyTorch's number of threads.
    """
    import numba
    from numba.core import config

    claim_threads()
    with suppress(ValueError):
        running: str = numba.threading_layer()  # raises ValueError if none runs
        return running
    before, threads = config.THREADING_LAYER, torch.get_num_threads()
    for layer in [before] if before != "default" else ["omp", "workqueue"]:
        config.THREADING_LAYER = layer
        try:
            numba.get_num_threads()  # starts it
        except ValueError:
            continue
        finally:
            config.THREADING_LAYER = before
        torch.set_num_threads(threads)  # if both share OpenMP, Numba has just claimed all cores
        started: str = numba.threading_layer()
        return started
    raise ImportError(f"Numba cannot load its threading layer {before!r}")


@cache
def claim_threads() -> int:
    """Return the process that the threads belong to: the first one that calls this."""
    return os.getpid()


def is_forked() -> bool:
    """Return whether this process was forked from the owner of the threads. OpenMP kills a child that uses them."""
    return bool(claim_threads.cache_info().currsize) and claim_threads() != os.getpid()


@cache
def parallel_loop_lock() -> AbstractContextManager[Any]:
    """Return the lock of parallel loops. Numba's own layer aborts the process if two threads use it at once."""
    return threading.RLock() if start_threading_layer() == "workqueue" else nullcontext()


@contextmanager
def numba_threads() -> Iterator[int]:
    """Run this thread's parallel loops with as many threads as PyTorch has, then restore the number."""
    import numba

    count = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    with parallel_loop_lock():
        before = numba.get_num_threads()
        numba.set_num_threads(count)
        try:
            yield count
        finally:
            numba.set_num_threads(before)
