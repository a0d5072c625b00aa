"""Followers: the processes of ranks 1, 2, ..., which never outlive rank 0.

Each follower is a new Python interpreter (never a fork, which would copy threads and locks) with a pipe to rank 0. If
rank 0 ends, even by kill -9, the pipe closes, and the follower exits immediately. If a follower dies, rank 0 kills the
other followers.
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

Job = Callable[[Connection], object]  # a follower calls it with its pipe
START_CODE = f"from {__name__} import run_follower; run_follower({{}})"
READY = b"ready"  # a follower's first message: it has received its job
EXIT_TIMEOUT = 2.0  # seconds that followers have to exit before they are killed
DEATH_TIMEOUT = 1.0  # seconds to find out how a follower died, after its connections have closed


class Followers:
    """The processes of ranks 1, 2, ..., and the thread that watches them."""

    def __init__(self, num_ranks: int) -> None:
        """Start all ranks but the first. They run until end() is called, this object is freed or the program exits."""
        self._folder = TemporaryDirectory(prefix="nanovllm-ranks-", ignore_cleanup_errors=True)
        self.store_path = os.path.join(self._folder.name, "store")  # the file through which the ranks find each other
        num_threads = torch.get_num_threads()
        torch.set_num_threads(max(1, num_threads // num_ranks))  # the ranks share the machine's cores
        self._pipes, self._processes = list[Connection](), list[subprocess.Popen[bytes]]()
        self._deaths, self._is_over = list[str](), threading.Event()  # over: end() was called, or a follower has died
        end_args = self._pipes, self._processes, self._is_over, self._folder, num_threads
        self.end = weakref.finalize(self, end_followers, *end_args)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
        }
        for _ in range(1, num_ranks):
            pipe, other_end = Pipe()
            self._pipes.append(pipe)
            with other_end:
                descriptor = other_end.fileno()
                command = [sys.executable, "-c", START_CODE.format(descriptor)]
                # In a new session, a follower gets no Ctrl-C: rank 0 decides when to stop.
                process = subprocess.Popen(command, env=environment, pass_fds=[descriptor], start_new_session=True)
            self._processes.append(process)

    def run(self, jobs: list[Job]) -> None:
        """Send each follower its job, wait until all have received theirs, and start the thread that watches them.

        Raise OSError if a follower has died.
        """
        for pipe, job in zip(self._pipes, jobs, strict=True):
            pipe.send_bytes(pickle.dumps(job))
        for rank, pipe in enumerate(self._pipes, start=1):
            if (message := read_message(pipe)) != READY:
                self._deaths.append(describe_exit(rank, message, self._processes[rank - 1]))
                raise ChildProcessError(self._deaths[0])
        watch_args = self._pipes, self._processes, self._deaths, self._is_over
        threading.Thread(target=watch, args=watch_args, name="nanovllm ranks", daemon=True).start()

    def send(self, message: bytes) -> None:
        """Send a message to all followers. Raise OSError if one has died."""
        for pipe in self._pipes:
            pipe.send_bytes(message)

    @property
    def any_died(self) -> bool:
        return bool(self._deaths)

    def death(self) -> str | None:
        """Return how the first follower died. Return None if none dies within DEATH_TIMEOUT."""
        self._is_over.wait(DEATH_TIMEOUT)
        return self._deaths[0] if self._deaths else None


def watch(
    pipes: list[Connection], processes: list["subprocess.Popen[bytes]"], deaths: list[str], is_over: threading.Event
) -> None:
    """Wait until a follower dies, record how, and kill the others. Do nothing if end() was called first."""
    [pipe, *_] = wait(pipes)
    assert isinstance(pipe, Connection)
    if is_over.is_set():
        return
    rank = pipes.index(pipe) + 1
    deaths.append(describe_exit(rank, read_message(pipe), processes[rank - 1]))
    is_over.set()
    for process in processes:
        process.kill()


def read_message(pipe: Connection) -> bytes:
    """Return a follower's next message, or b"" if it has ended without one."""
    with suppress(EOFError, OSError):
        return pipe.recv_bytes()
    return b""


def describe_exit(rank: int, error: bytes, process: "subprocess.Popen[bytes]") -> str:
    """Return a sentence that says how a follower ended. `error` is its last message, or empty."""
    if error:
        return f"rank {rank} has ended: {error.decode()}"
    with suppress(subprocess.TimeoutExpired):
        process.wait(DEATH_TIMEOUT)
    status = process.poll()
    return f"rank {rank} has ended: " + (f"signal {-status}" if status and status < 0 else f"exit status {status}")


def end_followers(
    pipes: list[Connection],
    processes: list["subprocess.Popen[bytes]"],
    is_over: threading.Event,
    folder: "TemporaryDirectory[str]",
    num_threads: int,
) -> None:
    """Ask the followers to exit, and kill those that don't. Delete the folder, and restore torch's thread count."""
    is_over.set()
    for pipe in pipes:
        with suppress(OSError):
            pipe.send_bytes(b"")
    deadline = time.monotonic() + EXIT_TIMEOUT
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    folder.cleanup()
    torch.set_num_threads(num_threads)


# A follower's process


def run_follower(descriptor: int) -> None:
    """Run the job that rank 0 sends, and exit this process."""
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
    os._exit(status)  # without Python's cleanup: there is nothing to clean up


def exit_when_closed(descriptor: int) -> None:
    """Wait until the other end of the pipe closes, without holding the GIL, and exit this process immediately."""
    poller = select.poll()
    poller.register(descriptor, 0)  # poll() always reports a hang-up
    poller.poll()
    os._exit(1)
