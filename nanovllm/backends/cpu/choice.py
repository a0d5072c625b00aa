"""Choice: whether an engine computes with kernels or with plain operations, and why.

installed, of use, in the cache     kernels from the first request on: they are loaded in less than a second
installed, of use, not compiled     a spawned process compiles them; plain operations until it has ended, and until
                                    no request is there: a request never meets both
forced by the caller                kernels or an error; what is not compiled is compiled before the engine is there
else                                plain operations
"""

import os
import weakref
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch

from .cache import discard, find_folder, is_complete, note_use
from .compiler import Compiler
from .compiling import compile_here
from .threads import is_forked

LEAST_NUMBA = (0, 68)
INSTALL = "pip install nanovllm[kernels]"
FORKED = "this process was forked from one with kernels"


class Runner(Protocol):
    def use_kernels(self) -> None: ...
    def drop_kernels(self) -> None: ...


class Choice:
    """An engine's. It belongs to the engine's thread."""

    def __init__(self, backend: str, runner: Runner, dtype: torch.dtype, refusal: str | None = None) -> None:
        """backend: one of BACKENDS; refusal: why kernels cannot serve the engine's model, if so.

        Raises ValueError if kernels are forced and cannot be had.
        """
        if backend == "triton":
            raise ValueError("attention_backend 'triton' cannot be had: its kernels are for a GPU (--device cuda)")
        self._runner = runner
        self._compiler: Compiler | None = None
        self.uses_kernels = False
        self.why = "they were asked for" if backend == "torch" else refusal or lack()  # plain operations
        if self.why is None:
            folder = find_folder(str(dtype).removeprefix("torch."))
            self._force(dtype, folder) if backend == "numba" else self._begin(dtype, folder)
        elif backend == "numba":
            raise ValueError(f"attention_backend 'numba' cannot be had: {self.why}")
        CHOICES.add(self)

    @property
    def says(self) -> str:
        """For the last line of a command."""
        if not self.uses_kernels:
            return f"plain operations: {self.why}"
        return f"kernels: numba {version('numba')}, {torch.get_num_threads()} threads"

    @property
    def is_compiling(self) -> bool:
        return self._compiler is not None and not self._compiler.has_ended

    @property
    def awaits_idle(self) -> bool:
        """There is something to take up, as soon as no request is there."""
        return self._compiler is not None and self._compiler.has_ended

    def wait(self, seconds: float) -> None:
        """For a compiler, at most so long."""
        if self._compiler is not None:
            self._compiler.wait(seconds)

    def take_up(self) -> None:
        """Use the kernels if they have been compiled meanwhile. No request may be there."""
        if not self.awaits_idle:
            return
        error, self._compiler = self._compiler.error, None
        if error is None:
            self._use()
        else:
            self.why = f"kernels could not be compiled: {error}"

    def close(self) -> None:
        """End a compiler that still runs."""
        if self._compiler is not None:
            self._compiler.close()
            self._compiler, self.why = None, "the engine was ended"

    def _force(self, dtype: torch.dtype, folder: Path | None) -> None:
        try:
            compile_here(dtype, folder)
            self._runner.use_kernels()
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
            self._runner.use_kernels()
        except Exception as error:  # too little memory, no thread: plain operations need less
            self.why = f"kernels could not be taken up: {type(error).__name__}: {error}"
        else:
            self.uses_kernels, self.why = True, None

    def _forked(self) -> None:
        """In a forked child: no thread of the parent is there, and the compiler is not the child's."""
        if self._compiler is not None:
            self._compiler.forget()
            self._compiler, self.why = None, "this process was forked"
        if self.uses_kernels:
            self._runner.drop_kernels()
            self.uses_kernels, self.why = False, FORKED


def is_loaded(dtype: torch.dtype, folder: Path) -> bool:
    """Load the kernels, if all of them are there. Files that cannot be read are removed, to be written anew."""
    if not is_complete(folder):
        return False
    try:
        compile_here(dtype, folder)
    except Exception:  # whatever a damaged file may raise
        discard(folder)
        return False
    note_use(folder)
    return True


def lack() -> str | None:
    """What this process lacks for kernels, if so."""
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
    """OpenMP waits in the child, too, for the threads that it had in the parent: one thread waits for nobody."""
    if choices := list(CHOICES):
        torch.set_num_threads(1)
    for choice in choices:
        choice._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=after_fork)
