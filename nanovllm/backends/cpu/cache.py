"""Where compiled kernels are kept: a folder for each dtype, and for all else on which the machine code depends.

    ~/.cache/nanovllm/kernels-0.1.0/bfloat16-1f0c.../   files of Numba; `complete`, which lists them with sizes

Numba looks at the file of a function alone, not at those that it calls. So the folder's name has a hash of all sources:
whoever changes one gets another folder. Two dtypes never share one: two writers of one index would mix up their code.
"""

import json
import os
import platform
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

from ... import __version__

COMPLETE = "complete"
DAYS_KEPT = 30  # of what nobody has loaded since
NUMBA_SETTINGS = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_OPT")


def root() -> Path:
    """Return the folder of all kernels. Raise RuntimeError if there is no home."""
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(given) / f"nanovllm-kernels-{__version__}"
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
    """Return the folder for kernels of this dtype, one of this process alone if the user's is read-only, or None.

    A user's folder that can be read alone, but is complete, is copied.
    """
    name = f"{dtype}-{fingerprint()}"
    with suppress(OSError, RuntimeError):
        folder = root() / name
        if is_writable(folder):
            return folder
    with suppress(OSError, RuntimeError):
        folder = own_root() / name
        if is_complete(root() / name):
            shutil.copytree(root() / name, folder, dirs_exist_ok=True)
        if is_writable(folder):
            return folder
    return None


def is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


@cache
def own_root() -> Path:
    """Return a folder that is removed with this process."""
    kept = tempfile.TemporaryDirectory(prefix="nanovllm-kernels-", ignore_cleanup_errors=True)
    own_root.kept = kept  # type: ignore[attr-defined]
    return Path(kept.name)


def files_in(folder: Path) -> dict[str, int]:
    """Return Numba's files, with their sizes."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.glob("*/*.nb[ic]")}


def is_complete(folder: Path) -> bool:
    """Return whether a compiler has finished in this folder, and all its files still exist."""
    try:
        return json.loads((folder / COMPLETE).read_text()) == files_in(folder) != {}
    except (OSError, ValueError):
        return False


def mark_complete(folder: Path) -> None:
    written = folder / f"{COMPLETE}.{os.getpid()}"
    written.write_text(json.dumps(files_in(folder)))
    written.replace(folder / COMPLETE)


def note_use(folder: Path) -> None:
    with suppress(OSError):
        os.utime(folder / COMPLETE)


def discard(folder: Path) -> None:
    """Remove a folder whose files cannot be loaded."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_left(folder: Path) -> None:
    """Remove files that a killed compiler has not finished, and folders beside this one that nobody uses any more."""
    with suppress(OSError):
        for path in folder.glob("*/*.tmp.*"):
            path.unlink(missing_ok=True)
        for other in folder.parent.iterdir():
            if other != folder and other.is_dir() and age(other) > DAYS_KEPT:
                discard(other)


def age(folder: Path) -> float:
    """Return the days since it was used."""
    newest = max((path.stat().st_mtime for path in (folder, folder / COMPLETE) if path.exists()), default=0.0)
    return (time.time() - newest) / 86400
