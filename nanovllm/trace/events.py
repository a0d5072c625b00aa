"""The events as data (EVENTS.md says what they mean), and a file of them: JSON lines, written whole or not at all."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

VERSION = 1
COMMON = ("kind", "step", "by")  # "by" is not in a snapshot and a step
KEYS: dict[str, tuple[str, ...]] = {
    "snapshot": ("version", "stage", "pool", "host", "max_num_seqs", "max_num_batched_tokens", "state"),
    "arrive": ("seq", "request", "tokens", "texts", "max_num_tokens", "carried_by", "seconds"),
    "refused": ("request", "why"),
    "held_up": ("seq", "why", "needed", "free"),
    "admit": ("seq", "num_computed_tokens"),
    "reserved": ("seq", "start", "end"),
    "released": ("seq", "start", "end"),
    "taken": ("block", "seq", "index", "why"),
    "shared": ("block", "seq", "index", "from", "why"),
    "hit": ("block", "seq", "index", "was"),
    "given_back": ("block", "seq", "why"),
    "free": ("block", "place"),
    "idle": ("block", "place"),
    "copied": ("from", "to", "seq"),
    "cached": ("block", "hash"),
    "evicted": ("block", "hash", "why"),
    "stored": ("from", "to", "hash"),
    "renewed": ("to", "hash"),
    "host_evicted": ("block", "hash", "why"),
    "loaded": ("from", "to", "seq"),
    "arrived": ("from", "to"),
    "forked": ("seq", "from", "behind"),
    "chunk": ("seq", "start", "end", "why"),
    "raised": ("sequences", "error"),
    "token": ("seq", "token", "text", "position"),
    "preempt": ("seq", "for", "why"),
    "abort": ("request",),
    "end": ("seq", "why", "error", "seconds"),
    "step": ("began", "seconds", "error"),
}


class FileSink:
    """Events go to a file, a step at a time; a line is in it as a whole or not at all."""

    def __init__(self, path: str | Path) -> None:
        """Replaces the file if it is there. Raises OSError if it cannot be written."""
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115  it is closed by __exit__
        self._lines: list[bytes] = []

    def __call__(self, event: dict[str, Any]) -> None:
        line = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        self._lines.append(line.encode("utf-8", "replace") + b"\n")
        if event["kind"] in ("step", "snapshot") or len(self._lines) >= 1000:
            self._flush()

    def __enter__(self) -> "FileSink":
        return self

    def __exit__(self, *_: Any) -> None:
        """What is left is written, if it can be."""
        with self._file:
            self._flush()

    def _flush(self) -> None:
        rest, self._lines = memoryview(b"".join(self._lines)), []
        num_whole = self._file.tell() if self._file.seekable() else None
        try:
            while rest:
                num_written = self._file.write(rest)
                if num_whole is not None and b"\n" in bytes(rest[:num_written]):
                    num_whole += bytes(rest[:num_written]).rindex(b"\n") + 1
                rest = rest[num_written:]
        except OSError:
            if num_whole is not None:
                with suppress(OSError):  # a device may not be cut
                    os.ftruncate(self._file.fileno(), num_whole)
            raise


def read_trace(path: str | Path) -> Iterator[dict[str, Any]]:
    """The events of a file, the snapshot first. A last line without its end was being written when it was cut: it is
    left out. Raises ValueError, naming the line, for what is no trace, or of another version.
    """
    number = 0
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                break
            try:
                event = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: no JSON: {error.msg}") from None
            if not isinstance(event, dict) or event.get("kind") not in KEYS:
                raise ValueError(f"{path}, line {number}: no event of a trace: {line[:60].strip()}")
            if (event["kind"] == "snapshot") != (number == 1):
                raise ValueError(f"{path}, line {number}: a trace has one snapshot, its first line")
            if event.get("version", VERSION) != VERSION:
                raise ValueError(f"{path} is a trace of version {event['version']}, this reads version {VERSION}")
            yield event
    if number == 0:
        raise ValueError(f"{path} is empty: a trace begins with a snapshot")
