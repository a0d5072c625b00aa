"""Run git, and check its exit status."""

import subprocess
from collections.abc import Container
from pathlib import Path
from subprocess import CompletedProcess

from .model import ChainError


def git(root: Path, *arguments: str, stdin: bytes = b"", codes: Container[int] = (0,)) -> CompletedProcess[bytes]:
    """Run git in `root`. Raise ChainError, in git's own words, on an exit status that is not in `codes`."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, input=stdin, capture_output=True, check=False)
    except FileNotFoundError:
        raise ChainError("git is not installed, or not on the PATH") from None
    if done.returncode not in codes:
        words = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
        raise ChainError(f"git {arguments[0]}: {words[-1]}")
    return done
