"""Processes that a command has started, found by their titles, as Ray sets them for its workers."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path


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


def wait_for(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait until the condition is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still false after {seconds:g} seconds"
        time.sleep(0.02)
