"""The kernel compiler, which runs once per machine, either in this process or in a spawned one in the background.

    ~/.cache/nanovllm/kernels-0.2.0/bfloat16-1f0c.../   Numba's files, and `complete`, which lists them with their sizes

Numba's cache checks the file of a function, but not the files of the functions that it calls. So the folder's name has
a hash of all sources, and a change to any of them leads to another folder. The hash also covers the sources' path,
because Numba looks up code by path: a second copy of the sources would find nothing in the folder of the first. Each
dtype has its own folder, because two processes that write to the same index would mix up their code.

    python -m nanovllm.backends.cpu.compiler bfloat16 FOLDER

fills FOLDER and exits.
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
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from threading import Lock, Thread
from typing import IO, Any, NamedTuple, Self

import torch

from ... import __version__

MARKER = "complete"  # name of the file that marks a folder as complete
PROGRESS = "progress"  # name of the file that says how far the compiler is
DURATION = "about half a minute"  # the progress until the first kernel is ready
SECONDS_KEPT = 30 * 86400  # how long a folder is kept after its last use
NUMBA_SETTINGS = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_OPT")
COMPILE_LOCK = Lock()  # Numba's cache folder is a global setting, and each function has only one folder at a time


class Variant(NamedTuple):
    """The data types that kernels are compiled for."""

    dtype: torch.dtype
    is_kv_int8: bool = False

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.") + "-int8-kv" * self.is_kv_int8

    @classmethod
    def of(cls, name: str) -> Self:
        """Return the variant with this name.

        >>> Variant.of("bfloat16-int8-kv")
        Variant(dtype=torch.bfloat16, is_kv_int8=True)
        """
        dtype, _, rest = name.partition("-")
        return cls(getattr(torch, dtype), bool(rest))


# Folders


def cache_root() -> Path:
    """Return the root folder of compiled kernels. Raise RuntimeError if there is no home directory."""
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(named) / f"nanovllm-kernels-{__version__}"
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "nanovllm" / f"kernels-{__version__}"


def fingerprint(sources: Path = Path(__file__).parent) -> str:
    """Return a hash of everything that the machine code, or its place in Numba's cache, depends on."""
    from llvmlite import binding

    parts = [os.fsencode(os.path.abspath(sources)), *(path.read_bytes() for path in sorted(sources.glob("*.py")))]
    facts = [version("numba"), version("llvmlite"), sys.version, platform.machine(), binding.get_host_cpu_name()]
    facts.append(binding.get_host_cpu_features().flatten())  # a virtual machine may hide some features
    facts += [os.environ.get(name, "") for name in NUMBA_SETTINGS]
    return blake2b(b"\0".join(parts + [fact.encode() for fact in facts]), digest_size=12).hexdigest()


def find_folder(variant: str) -> Path | None:
    """Return a writable folder for kernels of this variant, or None if there is none.

    If the user's cache is read-only, the folder is temporary. Complete kernels in the cache are copied there.
    """
    name = f"{variant}-{fingerprint()}"
    for find_root in (cache_root, lambda: Path(temporary_root().name)):
        with suppress(OSError, RuntimeError):
            folder = find_root() / name
            if find_root is not cache_root and is_complete(cache_root() / name):
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
    """Return a temporary folder, which is removed when this process ends."""
    return tempfile.TemporaryDirectory(prefix="nanovllm-kernels-", ignore_cleanup_errors=True)


def files_in(folder: Path) -> dict[str, int]:
    """Return the size in bytes of each of Numba's files in a folder."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.glob("*/*.nb[ic]")}


def is_complete(folder: Path) -> bool:
    """Return whether a compiler has finished in this folder, and all files still have the recorded sizes."""
    try:
        recorded: object = json.loads((folder / MARKER).read_text())
        return recorded == files_in(folder) != {}
    except (OSError, ValueError):
        return False


def mark_complete(folder: Path) -> None:
    """Record the sizes of the folder's files, which marks it as complete."""
    unfinished = folder / f"{MARKER}.{os.getpid()}"
    unfinished.write_text(json.dumps(files_in(folder)))
    unfinished.replace(folder / MARKER)


def remove_old(folder: Path) -> None:
    """Remove the folders next to this one that have not been used for SECONDS_KEPT."""
    with suppress(OSError):
        for other in folder.parent.iterdir():
            if other != folder and time.time() - other.stat().st_mtime > SECONDS_KEPT:
                shutil.rmtree(other, ignore_errors=True)


# Compiling


def entry_of(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
    """Return the function that Python calls, with example arguments, of which only the types matter."""
    import numpy as np

    from .attention import Pool
    from .int8_attention import Int8Pool
    from .matmul import type_of
    from .step import NO_STEP, Model, Sizes, Weights, Workspace, run_step
    from .vectors import like_of

    def zeros(fields: Any) -> Any:
        return fields(*[0] * len(fields._fields))

    like, like_x = like_of(variant.dtype), like_of(type_of(variant.dtype))
    pool = Int8Pool if variant.is_kv_int8 else Pool
    fixed = zeros(pool), zeros(Sizes), zeros(Weights), zeros(Workspace), np.float32(0)
    return run_step, (0, 0, NO_STEP, Model(like, like_x, *fixed))


def compile_step(variant: Variant, folder: Path | None) -> None:
    """Compile the step for `variant`, or load it from `folder`. If `folder` is None, store nothing.

    Raise OSError if the disk is full.
    """
    with COMPILE_LOCK:
        from numba import typeof

        function, example = entry_of(variant)
        if folder is not None:
            store_in(folder, function)
        with progress_in(folder) if folder is not None else nullcontext():
            function.compile(tuple(map(typeof, example)))


def store_in(folder: Path, function: Any) -> None:
    """Make Numba load `function` from `folder`, and store it there. Other functions keep their folders."""
    from numba.core import config

    before, config.CACHE_DIR = config.CACHE_DIR, str(folder)
    try:
        function.enable_caching()
    finally:
        config.CACHE_DIR = before


@contextmanager
def progress_in(folder: Path) -> Iterator[None]:
    """Record in the folder how many of the kernels in step.py have been compiled. Every variant needs all of them."""
    from numba.core.dispatcher import Dispatcher
    from numba.core.event import Event, Listener, install_listener

    from . import step

    kernels = [
        each for each in vars(step).values() if isinstance(each, Dispatcher) and each.__module__ == step.__name__
    ]
    with suppress(OSError):  # of a compiler that was killed
        (folder / PROGRESS).unlink()
    names = {each.py_func.__name__ for each in kernels if each.targetoptions.get("inline") != "always"}
    done: set[str] = set()

    class Recorder(Listener):  # type: ignore[misc]
        def on_start(self, event: Event) -> None: ...

        def on_end(self, event: Event) -> None:
            done.add(event.data["dispatcher"].__name__)
            with suppress(OSError):
                (folder / PROGRESS).write_text(f"{len(done & names)} of {len(names)} are ready")

    try:
        with install_listener("numba:compile", Recorder()):
            yield
    finally:
        with suppress(OSError):
            (folder / PROGRESS).unlink()


def read_progress(folder: Path | None) -> str:
    """Return in words how far the compiler of this folder is."""
    with suppress(OSError):
        if folder is not None and (text := (folder / PROGRESS).read_text()):
            return text
    return DURATION


def compile_here(variant: Variant, folder: Path | None) -> None:
    """Compile in this process. If the disk is full, use the kernels without storing them."""
    try:
        compile_step(variant, folder)
        if folder is not None and not is_complete(folder):
            mark_complete(folder)
    except OSError:
        compile_step(variant, None)


def fill(variant: Variant, folder: Path) -> None:
    """Compile into a folder unless it is complete. If another process is compiling into it, wait for that process."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        if not is_complete(folder):
            remove_old(folder)
            compile_step(variant, folder)
            mark_complete(folder)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file lock, which is released even if the process is killed. Without system support, do not wait."""
    with open(path, "w") as file:
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# In another process


class Compiler:
    """A process that compiles into the cache. It is killed by close(), or when this object is freed or Python exits.

    It is spawned, because Numba's OpenMP layer kills a forked child at its first parallel loop.
    """

    def __init__(self, variant: Variant, folder: Path) -> None:
        """Start the process. Raise OSError if that fails."""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the Compiler
        self.process = start(variant.name, folder, self._output)
        self._finalizer = weakref.finalize(self, kill, self.process)

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def error(self) -> str | None:
        """The last line of output if the process failed, or None."""
        if self.process.returncode == 0:
            return None
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").split("\n")
        status = f"the compiler exited with status {self.process.returncode}"
        return next((line for line in reversed(lines) if line.strip()), status)

    def wait(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def close(self) -> None:
        self._finalizer()

    def forget(self) -> None:
        """Leave the process alone in a forked child, because it belongs to the parent."""
        self._finalizer.detach()


def start(variant: str, folder: Path, output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a compiler process. It imports from the same paths as this process, and ignores the terminal's Ctrl-C."""
    # do not resolve links: the process must store code under the same path as this one
    package = Path(os.path.abspath(__file__))
    paths = [str(package.parents[3]), *filter(None, sys.path)]
    return subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.compiler", variant, str(folder)],
        stdin=subprocess.PIPE,  # closes when this process ends, however it ends
        stdout=output,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process, and wait until it has ended."""
    process.kill()
    process.communicate()  # also closes its standard input


def exit_when_input_closes() -> None:
    """Exit when standard input closes, because the process that started this one has ended."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    Thread(target=exit_when_input_closes, daemon=True).start()
    with suppress(OSError, AttributeError):
        os.nice(19)  # leave the CPU to engines that serve requests meanwhile
    torch.set_num_threads(1)
    fill(Variant.of(sys.argv[1]), Path(sys.argv[2]))
