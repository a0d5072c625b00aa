"""The server of a storm: its processes, their memory and their files."""

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

from ...testing.engines import UNMEASURED
from ...testing.processes import REPOSITORY
from ...testing.served import STORYTELLER, Served

START = 180.0  # seconds: kernels may have to be compiled
IDLE = 20.0  # seconds in which the engine becomes idle, once no client is left
POOL = ("--kv-cache-tokens", "8192")  # small: the first round touches all of it
FAULTS = ("Traceback", "Exception", "never retrieved", "never awaited")  # must not be in the log


class Size(NamedTuple):
    """Memory and files of an idle server."""

    front: int  # bytes
    engine: int
    files: int  # that the front has open

    def __str__(self) -> str:
        return f"front {self.front / 2**20:.1f} MiB, engine {self.engine / 2**20:.1f} MiB, {self.files} files"


@contextmanager
def storm_server(log: Path, *flags: str, port: int = 0) -> Iterator[Served]:
    """Run a server that writes its standard error to a file."""
    command = [sys.executable, "-m", "nanovllm", "serve", str(STORYTELLER), "--port", str(port), *UNMEASURED]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--chat-template", "plain", *POOL, *flags],
            stderr=file,
            text=True,
            cwd=REPOSITORY,
            env=environment,
        )
    try:
        yield Served(process, wait_for_address(process, log))
    finally:
        process.kill()
        process.wait()


def wait_for_address(process: subprocess.Popen[str], log: Path) -> str:
    """Return the address that the server prints once it is ready."""
    end = time.monotonic() + START
    while not (address := re.search(r"at (http://\S+),", log.read_text())):
        assert process.poll() is None and time.monotonic() < end, log.read_text() or "the server did not start"
        time.sleep(0.05)
    return address[1]


def check_log(log: Path) -> None:
    """Raise AssertionError if the server has logged a fault."""
    text = log.read_text()
    assert not any(fault in text for fault in FAULTS), text[-3000:]


def metrics_of(served: Served) -> dict[str, float]:
    """Return the engine's metrics by name, and the number of aborted samples."""
    text = httpx.get(served.url + "/metrics", timeout=10).text
    samples = re.findall(r"^vllm:(\w+)\{([^}]*)\} (\S+)$", text, re.MULTILINE)
    ended = {labels: value for name, labels, value in samples if name == "request_success_total"}
    aborted = sum(float(value) for labels, value in ended.items() if 'finished_reason="abort"' in labels)
    return {name: float(value) for name, _, value in samples} | {"aborted": aborted}


def wait_until_idle(served: Served) -> None:
    """Wait until no request runs or waits, and all blocks are free."""
    end = time.monotonic() + IDLE
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while any((metrics := metrics_of(served))[name] for name in names):
        assert time.monotonic() < end, f"not idle: { {name: metrics[name] for name in names} }"
        time.sleep(0.05)


def size_of(served: Served) -> Size:
    """Return the size of a server, or zeros on a system without /proc."""
    if not Path("/proc/self/fd").exists():
        return Size(0, 0, 0)
    front = served.process.pid
    return Size(rss(front), rss(served.engine_process()), len(os.listdir(f"/proc/{front}/fd")))


def rss(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()


def sockets_of(served: Served) -> int:
    """Return how many files the front may have open."""
    limits = Path(f"/proc/{served.process.pid}/limits")
    if not limits.exists():
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return int(re.search(r"Max open files +(\d+)", limits.read_text())[1])  # type: ignore[index]
