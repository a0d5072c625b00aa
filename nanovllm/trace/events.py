"""The events as data (EVENTS.md says what they mean), and a file of them: JSON lines, written whole or not at all."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VERSION = 1
BEGINNING = b'{"kind":"snapshot"'
MAX_CHARACTERS = 1 << 26  # of a line that is read: /dev/zero never ends
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
WHYS: dict[str, tuple[str, ...]] = {  # where they are a few words; that of a refusal is a sentence
    "held_up": ("batch", "seat", "piece", "promise", "blocks", "budget", "preemption", "failure"),
    "taken": ("admit", "grow", "copy"),
    "shared": ("fork",),
    "given_back": ("end", "preempt", "abort", "copy", "failed"),
    "evicted": ("taken", "reset"),
    "host_evicted": ("taken", "reset"),
    "chunk": ("prefill", "decode", "recompute"),
    "preempt": ("blocks", "step failed"),
    "end": ("stop", "length", "abort", "error", "beam"),
}


class FileSink:
    """Events go to a file, a step at a time; a line is in it as a whole or not at all."""

    def __init__(self, path: str | Path) -> None:
        """An old trace is replaced when the first event comes. Raises ValueError for a file that is something else;
        OSError if it cannot be written.
        """
        self._path, self._is_new, self._is_empty = Path(path), not os.path.exists(path), True
        if self._path.is_file() and os.path.getsize(path) and not is_trace(path):
            raise ValueError(f"{path} is there already, and is no trace: it is not replaced")
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0)
        self._lines: list[bytes] = []

    def __call__(self, event: dict[str, Any]) -> None:
        line = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        self._lines.append(line.encode("utf-8", "replace") + b"\n")
        if event["kind"] in ("step", "snapshot") or len(self._lines) >= 1000:
            self._flush()

    def __enter__(self) -> "FileSink":
        return self

    def __exit__(self, *_: Any) -> None:
        """What is left is written, if it can be. A file that was made for nothing is taken away."""
        with self._file:
            self._flush()
        if self._is_new and self._is_empty:
            self._path.unlink(missing_ok=True)

    def _flush(self) -> None:
        lines, self._lines = b"".join(self._lines), []
        if not lines:
            return
        can_cut = self._path.is_file()  # a pipe and a device cannot be
        if self._is_empty and can_cut:
            os.ftruncate(self._file.fileno(), 0)
        self._is_empty = False
        start, rest = self._file.tell() if can_cut else 0, memoryview(lines)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            if can_cut:  # behind the last whole line
                os.ftruncate(self._file.fileno(), start + lines.rfind(b"\n", 0, len(lines) - len(rest)) + 1)
            raise


def is_trace(path: str | Path) -> bool:
    """Whether the file begins as a trace does, of any version."""
    with open(path, "rb") as file:
        return file.read(len(BEGINNING)) == BEGINNING


def read_trace(path: str | Path) -> Iterator[dict[str, Any]]:
    """The events of a file, the snapshot first. A last line without its end was being written when it was cut: it is
    left out. Raises ValueError, naming the line, for what is no trace, or of another version.
    """
    num_events = 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_CHARACTERS), ""), start=1):
            if not line.endswith("\n"):
                break
            try:
                event = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: no JSON: {getattr(error, 'msg', error)}") from None
            if not isinstance(event, dict) or event.get("kind") not in KEYS:
                raise ValueError(f"{path}, line {number}: no event of a trace: {line[:60].strip()}")
            if event.get("version", VERSION) != VERSION:
                raise ValueError(f"{path} is a trace of version {event['version']}, this reads version {VERSION}")
            if missing := {*KEYS[event["kind"]], "step"} - event.keys():
                raise ValueError(f"{path}, line {number}: {event['kind']} has no {min(missing)}")
            if (event["kind"] == "snapshot") != (number == 1):
                raise ValueError(f"{path}, line {number}: a trace has one snapshot, its first line")
            yield event
            num_events = number
    if num_events == 0:
        raise ValueError(f"{path} has no whole line: a trace begins with a snapshot")
