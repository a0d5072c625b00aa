"""A file of results that holds whole lines only."""

import os
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import IO

from .streams import standard_output, unbuffered


def check_output(output: str, file: str, overwrite: bool, resume: bool) -> None:
    """Raises ValueError, before anything is computed, if it could not be kept or would replace what is there."""
    path = Path(output)
    if resume and (overwrite or output == "-"):
        raise ValueError("--resume needs --output, and no --overwrite: it goes on in a file of results")
    if output == "-":
        standard_output()
        return
    if path.exists() and not (overwrite or resume):
        raise ValueError(f"{output} is there already: --resume would go on in it, --overwrite replace it")
    if path.exists() and resume and not path.is_file():
        raise ValueError(f"{output} is no file that can be gone on in")
    if path.exists() and file != "-" and Path(file).exists() and path.samefile(file):
        raise ValueError(f"{output} is the file of requests: results need another")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} to")


def open_output(output: str, overwrite: bool, num_bytes: int | None = None) -> AbstractContextManager[IO[bytes]]:
    """The file without a buffer: after write_whole(), a line is in it or is not.

    `num_bytes` are those to keep of a file that is gone on in: what follows them is a line that was cut.
    """
    if output == "-":
        return nullcontext(unbuffered(standard_output()))
    if num_bytes is None:
        return open(output, "wb" if overwrite else "xb", buffering=0)
    stream = open(output, "ab", buffering=0)  # noqa: SIM115  # the caller closes it
    if stream.seek(0, os.SEEK_END) > num_bytes:
        stream.truncate(num_bytes)
    return stream


def write_whole(stream: IO[bytes], line: str) -> None:
    """Write a line. If the disk is full in the middle of it, the file ends with the line before; then OSError."""
    end = stream.seek(0, os.SEEK_END) if stream.seekable() else None  # before the first write, tell() is 0 after `>>`
    rest = memoryview(line.encode())
    try:
        while rest:
            rest = rest[stream.write(rest) :]
    except OSError:
        if end is not None:
            with suppress(OSError):  # /dev/full can be searched, and not be cut
                stream.truncate(end)
        raise
