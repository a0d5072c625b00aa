"""Followers: the processes of the other ranks, which live no longer than the one that starts them.

Each is a new interpreter (never a fork, which would copy threads and locks) with a pipe to rank 0. If rank 0 ends, even
by kill -9, the pipe closes, and the follower exits at once. If a follower ends, the others are killed.
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
SECONDS_TO_EXIT = 2.0  # that a follower gets before it is killed
SECONDS_TO_LEARN = 1.0  # how a follower died, after its connections have closed


class Followers:
    """The processes of ranks 1, 2, ..., and the thread that watches them."""

    def __init__(self, num_ranks: int) -> None:
        """Start all ranks but the first. They end with end(), with this object, or with the program."""
        self._folder = TemporaryDirectory(prefix="nanovllm-ranks-", ignore_cleanup_errors=True)
        self.store_path = os.path.join(self._folder.name, "store")  # where the ranks meet
        threads = torch.get_num_threads()
        torch.set_num_threads(max(1, threads // num_ranks))  # the ranks share the machine's cores
        self._pipes, self._processes = list[Connection](), list[subprocess.Popen[bytes]]()
        self._deaths, self._has_ended = list[str](), threading.Event()
        everything = self._pipes, self._processes, self._has_ended, self._folder, threads
        self.end = weakref.finalize(self, end, *everything)
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
                # In a session of its own, a follower gets no Ctrl-C: rank 0 decides when to stop.
                process = subprocess.Popen(command, env=environment, pass_fds=[descriptor], start_new_session=True)
            self._processes.append(process)

    def run(self, jobs: list[Job]) -> None:
        """Let each follower run its job, and watch them from now on. Raise OSError if one has died already."""
        for pipe, job in zip(self._pipes, jobs, strict=True):
            pipe.send_bytes(pickle.dumps(job))
        for rank, pipe in enumerate(self._pipes, start=1):
            if (answer := last_words(pipe)) != READY:
                self._deaths.append(death_of(rank, answer, self._processes[rank - 1]))
                raise ChildProcessError(self._deaths[0])
        watching = self._pipes, self._processes, self._deaths, self._has_ended
        threading.Thread(target=watch, args=watching, name="nanovllm ranks", daemon=True).start()

    def send(self, message: bytes) -> None:
        """Send a message to all followers. Raise OSError if one has died."""
        for pipe in self._pipes:
            pipe.send_bytes(message)

    @property
    def has_died(self) -> bool:
        return bool(self._deaths)

    def death(self) -> str | None:
        """Return how the first follower died, or None if all seem to live."""
        self._has_ended.wait(SECONDS_TO_LEARN)
        return self._deaths[0] if self._deaths else None


def watch(
    pipes: list[Connection], processes: list["subprocess.Popen[bytes]"], deaths: list[str], has_ended: threading.Event
) -> None:
    """Wait until a follower ends, and kill the others."""
    [pipe, *_] = wait(pipes)
    assert isinstance(pipe, Connection)
    if has_ended.is_set():
        return
    rank = pipes.index(pipe) + 1
    deaths.append(death_of(rank, last_words(pipe), processes[rank - 1]))
    has_ended.set()
    for process in processes:
        process.kill()


def last_words(pipe: Connection) -> bytes:
    """Return a follower's message, or nothing if it has ended without one."""
    with suppress(EOFError, OSError):
        return pipe.recv_bytes()
    return b""


def death_of(rank: int, error: bytes, process: "subprocess.Popen[bytes]") -> str:
    """Return one line about the end of a follower."""
    if error:
        return f"rank {rank} has ended: {error.decode()}"
    with suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS_TO_LEARN)
    status = process.poll()
    return f"rank {rank} has ended: " + (f"signal {-status}" if status and status < 0 else f"exit status {status}")


def end(
    pipes: list[Connection],
    processes: list["subprocess.Popen[bytes]"],
    has_ended: threading.Event,
    folder: "TemporaryDirectory[str]",
    threads: int,
) -> None:
    """Ask the followers to exit, and kill those that don't. Give this process its threads back."""
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
    logger.setLevel("ERROR")  # rank 0 has logged all else
    status = 1
    try:
        job: Job = pickle.loads(pipe.recv_bytes())
        pipe.send_bytes(READY)
        job(pipe)
        status = 0
    except BaseException as error:
        with suppress(OSError):
            pipe.send_bytes(f"{type(error).__name__}: {error}".encode())
    os._exit(status)  # nothing is left to clean up


def exit_when_closed(descriptor: int) -> None:
    """Wait, without the interpreter's lock, until the other end of the pipe is closed. Then exit at once."""
    hung_up = select.poll()
    hung_up.register(descriptor, 0)  # poll() always reports a hang-up
    hung_up.poll()
    os._exit(1)
