"""Choice: whether an engine computes with kernels or with plain operations, and why.

installed, suitable, in the cache   kernels from the first request on: they load in less than a second
installed, suitable, not compiled   a spawned process compiles them; plain operations until it has ended and there is no
                                    request, so that no request meets both
forced by the caller                kernels or an error; they are compiled before the engine is ready
otherwise                           plain operations
"""

import os
import weakref
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch

from ..torch.backend import Backend
from .cache import discard, find_folder, is_complete, note_use
from .compiler import Compiler
from .compiling import compile_here
from .threads import is_forked

LEAST_NUMBA = (0, 68)
INSTALL = "pip install nanovllm[kernels]"
FORKED = "this process was forked from one with kernels"


class Runner(Protocol):
    backend: Backend


class Choice:
    """The choice of an engine on a CPU. It belongs to the engine's thread."""

    def __init__(
        self,
        backend: str,
        runner: Runner,
        build: Callable[[], Backend],
        dtype: torch.dtype,
        refusal: str | None = None,
    ) -> None:
        """`backend` is one of BACKENDS; `runner` has the plain backend now, and gets that of build() in its place.

        `refusal` says why kernels cannot serve the engine's model, if so. Raise ValueError if kernels are forced and
        unavailable.
        """
        if backend == "triton":
            raise ValueError("attention_backend 'triton' cannot be had: its kernels are for a GPU (--device cuda)")
        self._runner, self._plain, self._build = runner, runner.backend, build
        self._compiler: Compiler | None = None
        self.uses_kernels = False
        self.why = "they were asked for" if backend == "torch" else refusal or missing_requirement()  # plain operations
        if self.why is None:
            folder = find_folder(str(dtype).removeprefix("torch."))
            if backend == "numba":
                self._force(dtype, folder)
            else:
                self._begin(dtype, folder)
        elif backend == "numba":
            raise ValueError(f"attention_backend 'numba' cannot be had: {self.why}")
        CHOICES.add(self)

    @property
    def says(self) -> str:
        """Return the choice in words, for the last line of a command."""
        if not self.uses_kernels:
            return f"plain operations: {self.why}"
        return f"kernels: numba {version('numba')}, {torch.get_num_threads()} threads"

    @property
    def is_compiling(self) -> bool:
        return self._compiler is not None and not self._compiler.has_ended

    @property
    def awaits_idle(self) -> bool:
        """Return whether kernels are ready to be taken up as soon as there is no request."""
        return self._compiler is not None and self._compiler.has_ended

    def wait(self, seconds: float) -> None:
        """Wait for the compiler, at most so long."""
        if self._compiler is not None:
            self._compiler.wait(seconds)

    def take_up(self) -> None:
        """Use the kernels if they have been compiled in the meantime. There must be no request."""
        if self._compiler is None or not self._compiler.has_ended:
            return
        error, self._compiler = self._compiler.error, None
        if error is None:
            self._use()
        else:
            self.why = f"kernels could not be compiled: {error}"

    def close(self) -> None:
        """End the compiler if it is still running."""
        if self._compiler is not None:
            self._compiler.close()
            self._compiler, self.why = None, "the engine was ended"

    def _force(self, dtype: torch.dtype, folder: Path | None) -> None:
        try:
            compile_here(dtype, folder)
            self._runner.backend = self._build()
        except Exception as error:
            raise ValueError(f"attention_backend 'numba' cannot be had: {type(error).__name__}: {error}") from error
        self.uses_kernels, self.why = True, None

    def _begin(self, dtype: torch.dtype, folder: Path | None) -> None:
        if folder is None:
            self.why = "compiled kernels can be kept nowhere; NUMBA_CACHE_DIR names a folder"
            return
        if is_loaded(dtype, folder):
            self._use()
            return
        try:
            self._compiler = Compiler(dtype, folder)
            self.why = "kernels are being compiled, once on this machine"
        except OSError as error:
            self.why = f"kernels could not be compiled: {error}"

    def _use(self) -> None:
        try:
            self._runner.backend = self._build()
        except Exception as error:  # too little memory, no thread: plain operations need less
            self.why = f"kernels could not be taken up: {type(error).__name__}: {error}"
        else:
            self.uses_kernels, self.why = True, None

    def drop_threads(self) -> None:
        """Go on in a forked child, without the threads and the compiler of its parent."""
        if self._compiler is not None:
            self._compiler.forget()
            self._compiler, self.why = None, "this process was forked"
        if self.uses_kernels:
            self._runner.backend.close()
            self._runner.backend = self._plain
            self.uses_kernels, self.why = False, FORKED


def is_loaded(dtype: torch.dtype, folder: Path) -> bool:
    """Load the kernels, and return True, if all of them are in the folder. Remove files that cannot be read."""
    if not is_complete(folder):
        return False
    try:
        compile_here(dtype, folder)
    except Exception:  # whatever a damaged file may raise
        discard(folder)
        return False
    note_use(folder)
    return True


def missing_requirement() -> str | None:
    """Return why kernels are unavailable in this process, or None."""
    if is_forked():
        return f"{FORKED}: spawn it"
    if find_spec("numba") is None:
        return f"numba is not installed ({INSTALL})"
    try:
        found = version("numba")
    except PackageNotFoundError:
        return f"numba is not installed as a package ({INSTALL})"
    if tuple(int(part) for part in found.split(".")[:2]) < LEAST_NUMBA:
        return f"numba {found} is installed, 0.68 is needed ({INSTALL})"
    return None


CHOICES: weakref.WeakSet[Choice] = weakref.WeakSet()


def after_fork() -> None:
    """Use one thread in the child: OpenMP would wait there for the threads that it had in the parent."""
    if choices := list(CHOICES):
        torch.set_num_threads(1)
    for choice in choices:
        choice.drop_threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=after_fork)
