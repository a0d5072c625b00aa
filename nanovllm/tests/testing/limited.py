"""Programs in a control group with limited memory."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ...host_memory import V1_FILES, V2_FILES

CGROUPS = Path("/sys/fs/cgroup")
SECONDS = 600
Run = Callable[..., str]  # runs a program and returns its output


def make_group(num_bytes: int) -> Path | None:
    """Make a group of either version, and return its folder, or None if this process may not make one."""
    for mount, (limit, *_) in ((CGROUPS / "memory", V1_FILES), (CGROUPS, V2_FILES)):
        folder = mount / f"nanovllm-test-{os.getpid()}"
        with suppress(OSError):
            folder.mkdir()
            try:
                (folder / limit).write_text(str(num_bytes))
            except OSError:
                folder.rmdir()
            else:
                return folder
    return None


@contextmanager
def group(num_bytes: int, must_exist: bool) -> Iterator[Run]:
    """Yield a function that runs a program in a group limited to this many bytes.

    If no group can be made, the test fails if it `must_exist`, and is skipped otherwise.
    """
    folder = make_group(num_bytes)
    if folder is None:
        assert not must_exist, "no control group can be made: run this test as root, in a container with cgroups"
        pytest.skip("no control group can be made")

    def run(*command: str, **environment: str) -> str:
        inside = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(folder), *command]
        done = subprocess.run(inside, capture_output=True, text=True, timeout=SECONDS, env=os.environ | environment)
        assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-2000:]}"
        return done.stdout

    try:
        yield run
    finally:
        folder.rmdir()
