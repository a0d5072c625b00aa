"""The kernel compiler, which runs once per machine, either in this process or in a spawned one in the background.

    ~/.cache/nanovllm/kernels-0.2.0/bfloat16-1f0c.../step     machine code, see machine_code.py

The folder's name has a hash of all sources and of the processor, and a change to any of them leads to another folder.

    python -m nanovllm.backends.cpu.compiler bfloat16 FOLDER

fills FOLDER and exits.
"""

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
from threading import Thread
from typing import IO, Any

import torch

from ... import __version__
from .machine_code import STEPS, MachineCode, Variant

CODE = "step"  # name of the file with the machine code
PROGRESS = "progress"  # name of the file that says how far the compiler is
DURATION = "about half a minute"  # the progress until the first kernel is ready
SECONDS_KEPT = 30 * 86400  # how long a folder is kept after its last use
NUMBA_SETTINGS = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_OPT")

# Folders


def cache_root() -> Path:
    """Return the root folder of compiled kernels. Raise RuntimeError if there is no home directory."""
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(named) / f"nanovllm-kernels-{__version__}"
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "nanovllm" / f"kernels-{__version__}"


def fingerprint(sources: Path = Path(__file__).parent) -> str:
    """Return a hash of everything that the machine code depends on."""
    from llvmlite import binding

    parts = [path.read_bytes() for path in sorted(sources.glob("*.py"))]
    facts = [version("numba"), version("llvmlite"), sys.version, platform.machine(), binding.get_host_cpu_name()]
    facts.append(binding.get_host_cpu_features().flatten())  # a virtual machine may hide some features
    facts += [os.environ.get(name, "") for name in NUMBA_SETTINGS]
    return blake2b(b"\0".join(parts + [fact.encode() for fact in facts]), digest_size=12).hexdigest()


def find_folder(variant: str) -> Path | None:
    """Return a folder with kernels of this variant, or else one that is writable, or None if there is none.

    If the user's cache is read-only and has no kernels, the folder is temporary.
    """
    name = f"{variant}-{fingerprint()}"
    for find_root in (cache_root, lambda: Path(temporary_root().name)):
        with suppress(OSError, RuntimeError):
            folder = find_root() / name
            if is_complete(folder) or is_writable(folder):
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


def is_complete(folder: Path) -> bool:
    """Return whether a compiler has finished in this folder, and its file is as the compiler wrote it."""
    return MachineCode.read(folder / CODE) is not None


def remove_old(folder: Path) -> None:
    """Remove the folders next to this one that have not been used for SECONDS_KEPT."""
    with suppress(OSError):
        for other in folder.parent.iterdir():
            if other != folder and time.time() - other.stat().st_mtime > SECONDS_KEPT:
                shutil.rmtree(other, ignore_errors=True)


# Compiling


def entry_of(variant: Variant) -> tuple[Any, Any]:
    """Return the function that the loader calls, and its Numba signature."""
    from numba import typeof, types

    from .layout import Int8Pool, Pool, type_of
    from .step import step_for
    from .vectors import like_of

    likes = [types.CPointer(typeof(like_of(each)).dtype) for each in (variant.dtype, type_of(variant.dtype))]
    return step_for(Int8Pool if variant.is_kv_int8 else Pool), types.int64(*[types.int64] * 4, *likes)


def compile_step(variant: Variant, folder: Path | None) -> MachineCode:
    """Compile the step for `variant`, once per process, and record the progress in `folder`."""
    function, signature = entry_of(variant)
    with progress_in(folder) if folder is not None else nullcontext():
        result = function.get_compile_result(signature)
    content, _ = result.library.serialize_using_object_code()[2]
    return MachineCode(result.fndesc.llvm_func_name, content)


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
    """Load the step of `variant`, after compiling it in this process unless `folder` has it.

    If there is no folder, or if the disk is full, the step is used without being stored.
    """
    code = None
    if folder is not None:
        with suppress(OSError):
            code = fill(variant, folder)
    STEPS[variant] = (code or compile_step(variant, None)).load()


def fill(variant: Variant, folder: Path) -> MachineCode:
    """Return the code in a folder, compiled if necessary. If another process compiles it, wait for that process.

    Raise OSError if it cannot be stored.
    """
    path = folder / CODE
    if code := MachineCode.read(path):
        return code
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        code = MachineCode.read(path)
        if code is None:
            remove_old(folder)
            code = compile_step(variant, folder)
            code.write(path)
    return code


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

    It is spawned, because a forked child would have this process's locks, but not the threads that hold them.
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
    paths = [str(Path(__file__).resolve().parents[3]), *filter(None, sys.path)]
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
