"""The server that a storm is for: its processes, their memory, their files, and what the operating system allows."""

import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

from ...helpers import UNMEASURED
from ..served import ROOT, STORYTELLER, Served

START = 180.0  # seconds: kernels may have to be compiled
IDLE = 20.0  # seconds in which all must be over, once no client is left
POOL = ("--kv-cache-tokens", "8192")  # small: a round touches all of it, and what is gained later is no pool
FAULTS = ("Traceback", "Exception", "never retrieved", "never awaited")  # what a server never has to say


class Size(NamedTuple):
    """Of the server, when nobody asks."""

    front: int  # bytes
    engine: int
    files: int  # that the front has open

    def __str__(self) -> str:
        return f"front {self.front / 2**20:.1f} MiB, engine {self.engine / 2**20:.1f} MiB, {self.files} files"


@contextmanager
def storm_server(log: Path, *flags: str, port: int = 0) -> Iterator[Served]:
    """A server whose words go to a file: there may be many of them."""
    command = [sys.executable, "-m", "nanovllm", "serve", str(STORYTELLER), "--port", str(port), *UNMEASURED]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--chat-template", "plain", *POOL, *flags], stderr=file, text=True, cwd=ROOT, env=environment
        )
    try:
        yield Served(process, wait_for_address(process, log))
    finally:
        process.kill()
        process.wait()


def wait_for_address(process: subprocess.Popen[str], log: Path) -> str:
    end = time.monotonic() + START
    while not (found := re.search(r"at (http://\S+),", log.read_text())):
        assert process.poll() is None and time.monotonic() < end, log.read_text() or "the server does not start"
        time.sleep(0.05)
    return found[1]


def check_log(log: Path) -> None:
    told = log.read_text()
    assert not any(fault in told for fault in FAULTS), told[-3000:]


def metrics_of(served: Served) -> dict[str, float]:
    """The engine's gauges."""
    told = httpx.get(served.url + "/metrics", timeout=10).text
    return {name: float(value) for name, value in re.findall(r"^vllm:(\w+)\{[^}]*\} (\S+)$", told, re.MULTILINE)}


def wait_until_idle(served: Served) -> None:
    """No request runs or waits, and all blocks are free."""
    end = time.monotonic() + IDLE
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while any((found := metrics_of(served))[name] for name in names):
        assert time.monotonic() < end, f"left in the engine: { {name: found[name] for name in names} }"
        time.sleep(0.05)


def size_of(served: Served) -> Size:
    """Where there is no /proc, zeros."""
    if not Path("/proc/self/fd").exists():
        return Size(0, 0, 0)
    front = served.process.pid
    return Size(rss(front), rss(served.engine_process()), len(os.listdir(f"/proc/{front}/fd")))


def rss(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()


def sockets_of(served: Served) -> int:
    """How many files the front may have open."""
    told = Path(f"/proc/{served.process.pid}/limits")
    if not told.exists():
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return int(re.search(r"Max open files +(\d+)", told.read_text())[1])  # type: ignore[index]
