"""Compiling the kernels, once per machine: in this process, or in a spawned one while plain operations compute.

    ~/.cache/nanovllm/kernels-0.2.0/bfloat16-1f0c.../   Numba's files, and `complete`, which lists them with their sizes

Numba's own cache checks the file of a function, but not the files of functions that it calls. Here the folder's name
has a hash of all sources, so a change of any of them leads to another folder. Two dtypes never share a folder, because
two processes that write to one index would mix up their code.

    python -m nanovllm.backends.cpu.compiler bfloat16 FOLDER

fills FOLDER and exits. It also exits when its standard input closes, so it cannot outlive the process that started it.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from threading import Event, Lock, Thread, current_thread
from typing import Any

import torch

from ... import __version__
from .threads import claim_threads, start_threading_layer

COMPLETE = "complete"
DAYS_KEPT = 30  # after the last use of a folder
NUMBA_SETTINGS = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_OPT")
MAX_LOADING_SECONDS = 10.0  # that a program waits at its end for a thread that is loading kernels
COMPILING = Lock()  # a function has one folder at a time, and Numba has one setting for all functions


# Folders


def cache_root() -> Path:
    """Return the folder of all kernels. Raise RuntimeError if there is no home directory."""
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(named) / f"nanovllm-kernels-{__version__}"
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "nanovllm" / f"kernels-{__version__}"


def fingerprint(sources: Path = Path(__file__).parent) -> str:
    """Return a hash of everything that the machine code depends on."""
    from llvmlite import binding

    parts = [path.read_bytes() for path in sorted(sources.glob("*.py"))]
    names = [version("numba"), version("llvmlite"), sys.version, platform.machine(), binding.get_host_cpu_name()]
    names.append(binding.get_host_cpu_features().flatten())  # a virtual machine may hide some
    names += [os.environ.get(name, "") for name in NUMBA_SETTINGS]
    return blake2b(b"\0".join(parts + [name.encode() for name in names]), digest_size=12).hexdigest()


def find_folder(dtype: str) -> Path | None:
    """Return a writable folder for kernels of this dtype, or None if there is none.

    If the user's cache is read-only the folder is a temporary one, with a copy of the user's kernels if they are
    complete.
    """
    name = f"{dtype}-{fingerprint()}"
    with suppress(OSError, RuntimeError):
        folder = cache_root() / name
        if is_writable(folder):
            return folder
    with suppress(OSError, RuntimeError):
        folder = Path(temporary_root().name) / name
        if is_complete(cache_root() / name):
            shutil.copytree(cache_root() / name, folder, dirs_exist_ok=True)
        if is_writable(folder):
            return folder
    return None


def is_writable(folder: Path) -> bool:
    """Create the folder if necessary, and return whether files can be created in it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


@cache
def temporary_root() -> "tempfile.TemporaryDirectory[str]":
    """Return a folder that is removed when this process ends."""
    return tempfile.TemporaryDirectory(prefix="nanovllm-kernels-", ignore_cleanup_errors=True)


def files_in(folder: Path) -> dict[str, int]:
    """Return Numba's files with their sizes."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.glob("*/*.nb[ic]")}


def is_complete(folder: Path) -> bool:
    """Return whether a compiler has finished in this folder, and all its files still exist."""
    try:
        recorded: object = json.loads((folder / COMPLETE).read_text())
        return recorded == files_in(folder) != {}
    except (OSError, ValueError):
        return False


def mark_complete(folder: Path) -> None:
    """Record the files in the folder."""
    unfinished = folder / f"{COMPLETE}.{os.getpid()}"
    unfinished.write_text(json.dumps(files_in(folder)))
    unfinished.replace(folder / COMPLETE)


def mark_used(folder: Path) -> None:
    """Postpone the removal of a folder."""
    with suppress(OSError):
        os.utime(folder / COMPLETE)


def discard(folder: Path) -> None:
    """Remove a folder whose files cannot be loaded."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_stale(folder: Path) -> None:
    """Remove files that a killed compiler left unfinished, and sibling folders that have not been used for long."""
    with suppress(OSError):
        for path in folder.glob("*/*.tmp.*"):
            path.unlink(missing_ok=True)
        for other in folder.parent.iterdir():
            if other != folder and other.is_dir() and days_unused(other) > DAYS_KEPT:
                discard(other)


def days_unused(folder: Path) -> float:
    """Return the days since the last use of a folder."""
    newest = max((path.stat().st_mtime for path in (folder, folder / COMPLETE) if path.exists()), default=0.0)
    return (time.time() - newest) / 86400


# Compiling


def entries(dtype: torch.dtype) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return each function that Python calls, with example arguments: only their types count."""
    import numpy as np

    from . import decode_step, step_attention
    from .attention import Pool
    from .elementwise import add_and_norm, silu_and_mul
    from .matmul import packed_linear, type_of
    from .sampler import find_peaks, join_chunks
    from .vectors import like_of

    def zeros(fields: Any) -> Any:
        return fields(*[0] * len(fields._fields))

    like, like_x, shape = like_of(dtype), like_of(type_of(dtype)), zeros(Pool)
    sizes, weights, work = (zeros(each) for each in (decode_step.Sizes, decode_step.Weights, decode_step.Workspace))
    model = decode_step.Model(like, like_x, shape, sizes, weights, work, np.float32(0))
    setup = zeros(step_attention.Setup)._replace(eps=0.0)
    attention = setup, zeros(step_attention.Plan), zeros(step_attention.Buffers)
    return [
        (decode_step.decode_step, (0, 0, zeros(decode_step.Step), model)),
        (step_attention.attend_step, (0, 0, 0, 0, 0, like, shape, *attention)),
        (add_and_norm, (0, 0, 0, 0.0, 0, 0, 0, like, 0)),
        (silu_and_mul, (0, 0, 0, 0, like, 0)),
        (packed_linear, (0, 0, 0, 0, 0, 0, 0, 0, like_x, like)),
        (join_chunks, (0, 0, 0, 0, 0, 0, 0)),
        *((find_peaks, (0, 0, 0, like_of(stored), 0, 0, 0)) for stored in {dtype, torch.float32}),
    ]


def compile_all(dtype: torch.dtype, folder: Path | None) -> None:
    """Compile each entry for `dtype`, or load it from `folder`. With None, store nothing.

    Raise OSError if the disk is full.
    """
    claim_threads()  # a child that is forked from now on must not use Numba, or this lock
    with COMPILING:
        from numba import typeof

        start_threading_layer()  # otherwise a function with a parallel loop would choose another layer
        for function, example in entries(dtype):
            if folder is not None:
                store_in(folder, function)
            function.compile(tuple(map(typeof, example)))


def store_in(folder: Path, function: Any) -> None:
    """Make Numba load and store `function` in `folder`, without changing its setting for other functions."""
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
    """Compile into a folder. A second compiler waits for the first one, and then has nothing to do."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        if not is_complete(folder):
            remove_stale(folder)
            compile_all(dtype, folder)
            mark_complete(folder)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that the system releases if the process is killed. Where there are no file locks, do not wait."""
    with open(path, "w") as file:
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# In another process


@dataclass
class Outcome:
    """The result of the thread that waits for a compiler."""

    has_ended: Event = field(default_factory=Event)
    is_cancelled: bool = False
    error: str | None = None


class Compiler:
    """A spawned process that fills the cache, and a thread that waits for it and then loads the kernels.

    The process ends with its owner, with this process, and by close(). It is never forked: Numba's OpenMP layer kills a
    forked child at its first parallel loop.
    """

    def __init__(self, dtype: torch.dtype, folder: Path) -> None:
        """Start the process. Raise OSError if that fails."""
        self.process = start(str(dtype).removeprefix("torch."), folder)
        self._outcome = Outcome()
        thread = Thread(target=watch, args=(self.process, self._outcome, dtype, folder), daemon=True, name="compiler")
        thread.start()
        self._finalizer = weakref.finalize(self, end, self.process, self._outcome, thread)

    @property
    def has_ended(self) -> bool:
        """Return whether all kernels are loaded, or there is an error."""
        return self._outcome.has_ended.is_set()

    @property
    def error(self) -> str | None:
        return self._outcome.error

    def wait(self, seconds: float) -> bool:
        return self._outcome.has_ended.wait(seconds)

    def close(self) -> None:
        self._finalizer()

    def forget(self) -> None:
        """Leave the process alone: in a forked child, it is the parent's."""
        self._finalizer.detach()


def start(dtype: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start the process, which imports modules from the same paths as this one, and ignores the terminal's Ctrl-C."""
    paths = [str(Path(__file__).resolve().parents[3]), *filter(None, sys.path)]
    return subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.compiler", dtype, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    )


def watch(process: subprocess.Popen[bytes], outcome: Outcome, dtype: torch.dtype, folder: Path) -> None:
    """Wait for the process, then load the kernels."""
    assert process.stdout is not None, "stdout must be a pipe"
    output = process.stdout.read().decode(errors="replace").split("\n")
    status = process.wait()
    if status:
        lines = [line for line in output if line.strip()]
        outcome.error = lines[-1] if lines else f"the compiler exited with status {status}"
    elif not outcome.is_cancelled:
        try:
            compile_all(dtype, folder)
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}"
    outcome.has_ended.set()


def end(process: subprocess.Popen[bytes], outcome: Outcome, thread: Thread) -> None:
    """End the process and its thread."""
    outcome.is_cancelled = True
    process.kill()
    if thread is not current_thread():  # a garbage collector runs in any thread
        thread.join(MAX_LOADING_SECONDS)
    assert process.stdin is not None, "stdin must be a pipe"
    with suppress(OSError):
        process.stdin.close()


def exit_with_input() -> None:
    """Exit when standard input closes, which happens when the process that started this one ends."""

    def watch_input() -> None:
        with suppress(OSError):
            while os.read(0, 1):
                pass
        os._exit(1)

    Thread(target=watch_input, daemon=True).start()


def main(dtype: str, folder: str) -> None:
    exit_with_input()
    with suppress(OSError, AttributeError):
        os.nice(19)  # engines that serve in the meantime come first
    torch.set_num_threads(1)
    fill(getattr(torch, dtype), Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
