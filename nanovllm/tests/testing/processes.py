"""The command in a process of its own, and processes that it has started."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

SECONDS = 120.0  # a guard against hanging
REPOSITORY = Path(__file__).resolve().parents[3]


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def let_others_run() -> None:
    """Pause, so that a fault in other threads has time to show. A correct program passes without it, too."""
    time.sleep(0.02)


def processor_seconds(*commands: list[str], rounds: int = 5) -> list[float]:
    """Return the least processor time of each command. They run in turns, since other programs may be running."""

    def seconds(command: list[str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return [min(times) for times in zip(*([seconds(c) for c in commands] for _ in range(rounds)), strict=True)]


def start(
    *arguments: str, path: Path | str = "", closed: str = "", env: dict[str, str] | None = None, **pipes: Any
) -> subprocess.Popen[str]:
    """Start `python -m nanovllm` in a process of its own.

    Modules in the folder `path` take precedence over installed ones. The stream named by `closed` is closed.
    """
    package = REPOSITORY / "nanovllm"
    command = [sys.executable, "-m", package.name, *arguments]
    if closed:
        redirection = {"stdin": "<&-", "stdout": ">&-", "stderr": "2>&-"}[closed]
        command = ["sh", "-c", f'exec "$@" {redirection}', "sh", *command]
    paths = os.pathsep.join(map(str, filter(None, (path, package.parent))))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | (env or {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | pipes
    return subprocess.Popen(command, env=environment, text=True, **pipes)


PRESS_AGAIN = """
import io, os, signal, sys
class Stderr(io.TextIOWrapper):
    def write(self, text):
        super().write(text)
        self.flush()
        if "interrupted" in text:
            os.kill(os.getpid(), signal.SIGINT)
        return len(text)
sys.stderr = Stderr(sys.stderr.buffer)
"""


def press_ctrl_c_again(path: Path) -> Path:
    """Make processes with this path press Ctrl-C once more as soon as they have printed that they are interrupted."""
    (path / "sitecustomize.py").write_text(PRESS_AGAIN)
    return path


# Processes that run


def until(holds: Callable[[], object], seconds: float = SECONDS) -> None:
    """Wait until this is true. Fail after so many seconds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"still false after {seconds:g} seconds"
        time.sleep(0.02)


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes that a process has started, and those that they have started."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            yield child
            yield from descendants(child)


def titled(pid: int, title: str) -> list[int]:
    """Return the descendants of a process with `title` in their command lines."""
    return [each for each in descendants(pid) if title in command_line(each)]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:  # it has ended
        return ""
