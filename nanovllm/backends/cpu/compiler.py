"""Compiler: a spawned process that fills the cache, and a thread that waits for it and then loads what is there.

Never a forked one: Numba's OpenMP layer kills a forked child at its first parallel loop.
"""

import os
import subprocess
import sys
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread, current_thread

import torch

from .compiling import compile_all

LOADING = 10.0  # seconds that the end of a program waits for a thread that is loading: it may not be cut


@dataclass
class State:
    """The result of the thread."""

    has_ended: Event = field(default_factory=Event)
    is_over: bool = False  # nobody wants it any more
    error: str | None = None


class Compiler:
    """A process that compiles. It ends with its owner, with this process, and by close()."""

    def __init__(self, dtype: torch.dtype, folder: Path) -> None:
        """Start it. Raise OSError if no process can be started."""
        name = str(dtype).removeprefix("torch.")
        self.process = start(name, folder)
        self._state = State()
        thread = Thread(target=watch, args=(self.process, self._state, dtype, folder), daemon=True, name="compiler")
        thread.start()
        self._finalizer = weakref.finalize(self, end, self.process, self._state, thread)

    @property
    def has_ended(self) -> bool:
        """Return whether all kernels are loaded, or there is an error."""
        return self._state.has_ended.is_set()

    @property
    def error(self) -> str | None:
        return self._state.error

    def wait(self, seconds: float) -> bool:
        return self._state.has_ended.wait(seconds)

    def close(self) -> None:
        self._finalizer()

    def forget(self) -> None:
        """Leave the process alone, in a forked child: it is the parent's."""
        self._finalizer.detach()


def start(dtype: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start the process. It finds modules where this one does, and ignores Ctrl-C in the terminal."""
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)]
    return subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.compiling", dtype, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    )


def watch(process: subprocess.Popen[bytes], state: State, dtype: torch.dtype, folder: Path) -> None:
    assert process.stdout is not None, "it is a pipe, as stdin is"
    said = process.stdout.read().decode(errors="replace").split("\n")
    status = process.wait()
    if status:
        told = [line for line in said if line.strip()]
        state.error = told[-1] if told else f"their compiler ended with status {status}"
    elif not state.is_over:
        try:
            compile_all(dtype, folder)
        except Exception as error:
            state.error = f"{type(error).__name__}: {error}"
    state.has_ended.set()


def end(process: subprocess.Popen[bytes], state: State, thread: Thread) -> None:
    state.is_over = True
    process.kill()
    if thread is not current_thread():  # a garbage collector runs in any
        thread.join(LOADING)
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
