"""Jobs of followers without an engine."""

import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch


def note(path: Path, pipe: Connection) -> None:
    """Write the number of threads and each message to a file. Raise ValueError if a message is the file's name."""
    with open(path, "wb", buffering=0) as file:
        file.write(b"%d threads\n" % torch.get_num_threads())
        while message := pipe.recv_bytes():
            file.write(message + b"\n")
            if message == path.name.encode():
                raise ValueError("no memory")
        file.write(b"asked to exit\n")


def sleep(pipe: Connection) -> None:
    """Never end, whatever rank 0 says."""
    time.sleep(3600)


class Unreadable:
    """A job that no process can read."""

    def __call__(self, pipe: Connection) -> None: ...

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return int, ("no number",)
