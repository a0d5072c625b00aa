"""Compile the kernels, or load what was compiled: in this process, or in one that is spawned for it.

    python -m nanovllm.backends.cpu.compiling bfloat16 FOLDER

fills FOLDER and ends; it also ends when its standard input does, so it cannot outlive who started it.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import torch

from .cache import is_complete, mark_complete, remove_left

ONE_AT_A_TIME = Lock()  # a function has one folder at a time, and Numba one setting for all


def compile_all(dtype: torch.dtype, folder: Path | None) -> None:
    """Compile each entry for `dtype`, or load it from `folder`; None: keep nothing. Raises OSError if it is full."""
    from .threads import started_in

    started_in()  # a child that is forked from now on leaves Numba alone, and the lock
    with ONE_AT_A_TIME:
        compile_or_load(dtype, folder)


def compile_or_load(dtype: torch.dtype, folder: Path | None) -> None:
    from numba import typeof

    from .entries import entries
    from .threads import start_team

    start_team()  # a function with a parallel loop would choose another layer
    for function, example in entries(dtype):
        if folder is not None:
            keep_in(folder, function)
        function.compile(tuple(map(typeof, example)))


def keep_in(folder: Path, function: Any) -> None:
    """Make Numba look for `function` in `folder`, and write it there. Nothing else of Numba's changes."""
    from numba.core import config

    before, config.CACHE_DIR = config.CACHE_DIR, str(folder)
    try:
        function.enable_caching()
    finally:
        config.CACHE_DIR = before


def compile_here(dtype: torch.dtype, folder: Path | None) -> None:
    """Compile in this process, however long it takes. A full disk does not stop it."""
    try:
        compile_all(dtype, folder)
        if folder is not None and not is_complete(folder):
            mark_complete(folder)
    except OSError:
        compile_all(dtype, None)


def fill(dtype: torch.dtype, folder: Path) -> None:
    """Compile into a folder. If two compilers meet, the second one waits for the first, and finds all done."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        if not is_complete(folder):
            remove_left(folder)
            compile_all(dtype, folder)
            mark_complete(folder)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock, which the system releases if the process is killed. Without file locks nobody waits."""
    with open(path, "w") as file:
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def end_with_input() -> None:
    """End this process when its standard input ends: the other end is held by who started it."""

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 1):
                pass
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def main(dtype: str, folder: str) -> None:
    end_with_input()
    with suppress(OSError, AttributeError):
        os.nice(19)  # whoever serves meanwhile comes first
    torch.set_num_threads(1)
    fill(getattr(torch, dtype), Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
