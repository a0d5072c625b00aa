"""Followers: the processes of the other ranks, which never outlive rank 0.

Each is a new interpreter (never a fork, which would copy threads and locks) with a pipe to rank 0. If rank 0 ends, even
by kill -9, the pipe closes, and the follower exits immediately. If a follower ends, the others are killed.
"""

import os
import pickle
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory

import torch

from ..log import logger

Job = Callable[[Connection], object]
CODE = f"from {__name__} import run; run({{}})"
READY = b"ready"
SECONDS_TO_EXIT = 2.0  # for a follower to exit, before it is killed
DEATH_SECONDS = 1.0  # to find out how a follower died, after its connections have closed


class Followers:
    """The processes of ranks 1, 2, ..., and the thread that watches them."""

    def __init__(self, num_ranks: int) -> None:
        """Start all ranks but the first. They run until end(), or until this object or the program goes away."""
        self._folder = TemporaryDirectory(prefix="nanovllm-ranks-", ignore_cleanup_errors=True)
        self.store_path = os.path.join(self._folder.name, "store")  # the file through which the ranks find each other
        threads = torch.get_num_threads()
        torch.set_num_threads(max(1, threads // num_ranks))  # the ranks share the machine's cores
        self._pipes, self._processes = list[Connection](), list[subprocess.Popen[bytes]]()
        self._deaths, self._has_ended = list[str](), threading.Event()
        to_end = self._pipes, self._processes, self._has_ended, self._folder, threads
        self.end = weakref.finalize(self, end, *to_end)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
        }
        for _ in range(1, num_ranks):
            pipe, other_end = Pipe()
            self._pipes.append(pipe)
            with other_end:
                descriptor = other_end.fileno()
                command = [sys.executable, "-c", CODE.format(descriptor)]
                # In a new session, a follower gets no Ctrl-C: rank 0 decides when to stop.
                process = subprocess.Popen(command, env=environment, pass_fds=[descriptor], start_new_session=True)
            self._processes.append(process)

    def run(self, jobs: list[Job]) -> None:
        """Send each follower its job, and start watching all of them. Raise OSError if one has already died."""
        for pipe, job in zip(self._pipes, jobs, strict=True):
            pipe.send_bytes(pickle.dumps(job))
        for rank, pipe in enumerate(self._pipes, start=1):
            if (answer := read_message(pipe)) != READY:
                self._deaths.append(describe_exit(rank, answer, self._processes[rank - 1]))
                raise ChildProcessError(self._deaths[0])
        to_watch = self._pipes, self._processes, self._deaths, self._has_ended
        threading.Thread(target=watch, args=to_watch, name="nanovllm ranks", daemon=True).start()

    def send(self, message: bytes) -> None:
        """Send a message to all followers. Raise OSError if one has died."""
        for pipe in self._pipes:
            pipe.send_bytes(message)

    @property
    def has_died(self) -> bool:
        return bool(self._deaths)

    def death(self) -> str | None:
        """Return how the first follower died, or None if all appear to be alive."""
        self._has_ended.wait(DEATH_SECONDS)
        return self._deaths[0] if self._deaths else None


def watch(
    pipes: list[Connection], processes: list["subprocess.Popen[bytes]"], deaths: list[str], has_ended: threading.Event
) -> None:
    """Wait until a follower dies, record how, and kill the others."""
    [pipe, *_] = wait(pipes)
    assert isinstance(pipe, Connection)
    if has_ended.is_set():
        return
    rank = pipes.index(pipe) + 1
    deaths.append(describe_exit(rank, read_message(pipe), processes[rank - 1]))
    has_ended.set()
    for process in processes:
        process.kill()


def read_message(pipe: Connection) -> bytes:
    """Return a follower's next message, or b"" if it has ended without one."""
    with suppress(EOFError, OSError):
        return pipe.recv_bytes()
    return b""


def describe_exit(rank: int, error: bytes, process: "subprocess.Popen[bytes]") -> str:
    """Return one line that says how a follower ended."""
    if error:
        return f"rank {rank} has ended: {error.decode()}"
    with suppress(subprocess.TimeoutExpired):
        process.wait(DEATH_SECONDS)
    status = process.poll()
    return f"rank {rank} has ended: " + (f"signal {-status}" if status and status < 0 else f"exit status {status}")


def end(
    pipes: list[Connection],
    processes: list["subprocess.Popen[bytes]"],
    has_ended: threading.Event,
    folder: "TemporaryDirectory[str]",
    threads: int,
) -> None:
    """Ask the followers to exit, and kill those that don't. Restore this process's number of threads."""
    has_ended.set()
    for pipe in pipes:
        with suppress(OSError):
            pipe.send_bytes(b"")
    deadline = time.monotonic() + SECONDS_TO_EXIT
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    folder.cleanup()
    torch.set_num_threads(threads)


# A follower's process


def run(descriptor: int) -> None:
    """Run the job that rank 0 sends, and exit."""
    pipe = Connection(descriptor)
    threading.Thread(target=exit_when_closed, args=(descriptor,), daemon=True).start()
    logger.setLevel("ERROR")  # rank 0 logs the same messages
    status = 1
    try:
        job: Job = pickle.loads(pipe.recv_bytes())
        pipe.send_bytes(READY)
        job(pipe)
        status = 0
    except BaseException as error:
        with suppress(OSError):
            pipe.send_bytes(f"{type(error).__name__}: {error}".encode())
    os._exit(status)  # skip the cleanup at exit: there is nothing to clean up


def exit_when_closed(descriptor: int) -> None:
    """Exit as soon as the other end of the pipe closes. Waiting does not hold the GIL."""
    poller = select.poll()
    poller.register(descriptor, 0)  # poll() always reports a hang-up
    poller.poll()
    os._exit(1)
