"""The kinds and keys of events, files of events, and a filter that hides texts. EVENTS.md explains the events."""

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Sink = Callable[[Event], object]  # takes one event at a time

VERSION = 2
BEGINNING = b'{"kind":"snapshot"'  # of the file of a trace
MAX_LINE_CHARACTERS = 1 << 26  # because a file such as /dev/zero never ends
COMMON_KEYS = ("kind", "step", "by")  # of every event, except that those in WITHOUT_BY have no "by"
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
    "disk_stored": ("hash",),
    "disk_dropped": ("hash",),
    "disk_evicted": ("hash",),
    "disk_loaded": ("hash", "to", "seq"),
    "disk_arrived": ("to",),
    "disk_bad": ("hash", "error"),
    "lost": ("to",),
    "forked": ("seq", "from", "behind"),
    "chunk": ("seq", "start", "end", "why"),
    "draft_proposed": ("seq", "tokens", "texts"),
    "draft_accepted": ("seq", "num_tokens"),
    "raised": ("sequences", "error"),
    "token": ("seq", "token", "text", "position"),
    "preempt": ("seq", "for", "why"),
    "abort": ("request",),
    "end": ("seq", "why", "error", "seconds"),
    "pools": ("free", "cached", "host_free", "host_cached"),
    "step": ("began", "seconds", "error"),
}
WITHOUT_BY = ("snapshot", "pools", "step")


# A file


class FileSink:
    """A file of JSON lines, written one step at a time. A full disk never leaves a partial line in it."""

    def __init__(self, path: str | Path) -> None:
        """Open the file. The first event replaces an old trace in it.

        Raise ValueError if the file holds anything else, and OSError if it cannot be written.
        """
        self._path, self._is_new, self._is_empty = Path(path), not os.path.exists(path), True
        if self._path.is_file() and os.path.getsize(path) and not is_trace(path):
            raise ValueError(f"{path} exists and is not a trace, so it will not be replaced")
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0)
        self._events: list[Event] = []
        self._encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

    def __call__(self, event: Event) -> None:
        """Add an event, which must not change afterwards."""
        self._events.append(event)
        if event["kind"] in ("step", "snapshot") or len(self._events) >= 1000:
            self._flush()

    def __enter__(self) -> "FileSink":
        return self

    def __exit__(self, *_: object) -> None:
        """Write the remaining events. Delete the file if it is new and still empty."""
        with self._file:
            self._flush()
        if self._is_new and self._is_empty:
            self._path.unlink(missing_ok=True)

    def _flush(self) -> None:
        events, self._events = self._events, []
        if not events:
            return
        # Encoding a list is 3 times as fast as encoding event by event. Inside a string, quotes follow a backslash, so
        # the replaced text occurs only between events.
        array = self._encode(events)
        lines = (array[1:-1].replace('},{"kind":', '}\n{"kind":') + "\n").encode("utf-8", "replace")
        can_cut = self._path.is_file()  # pipes and devices cannot be truncated
        if self._is_empty and can_cut:
            os.ftruncate(self._file.fileno(), 0)
        self._is_empty = False
        start, rest = self._file.tell() if can_cut else 0, memoryview(lines)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            if can_cut:  # keep only whole lines
                os.ftruncate(self._file.fileno(), start + lines.rfind(b"\n", 0, len(lines) - len(rest)) + 1)
            raise


def is_trace(path: str | Path) -> bool:
    """Return True if the file starts like a trace of any version."""
    with open(path, "rb") as file:
        return file.read(len(BEGINNING)) == BEGINNING


def read_trace(path: str | Path) -> Iterator[Event]:
    """Yield the events of a file, starting with the snapshot. Skip a partial last line.

    Raise ValueError for a file that is not a trace of this version, with the number of the first invalid line.
    """
    num_events = 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_CHARACTERS), ""), start=1):
            if not line.endswith("\n"):
                break
            try:
                event = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: not JSON: {getattr(error, 'msg', error)}") from None
            if not isinstance(event, dict) or event.get("kind") not in KEYS:
                raise ValueError(f"{path}, line {number}: not a trace event: {line[:60].strip()}")
            if event.get("version", VERSION) != VERSION:
                raise ValueError(f"{path} must be a trace of version {VERSION}, got version {event['version']}")
            if missing := {*KEYS[event["kind"]], "step"} - event.keys():
                raise ValueError(f"{path}, line {number}: {event['kind']} needs the key {min(missing)}")
            if (event["kind"] == "snapshot") != (number == 1):
                raise ValueError(f"{path}, line {number}: a trace needs exactly one snapshot, on its first line")
            yield event
            num_events = number
    if num_events == 0:
        raise ValueError(f"{path} has no complete line: a trace starts with a snapshot")


# Events without texts, for a page that shows a server's memory without revealing its contents

REFUSED = "the request cannot be served"  # instead of the reason, which may quote the request


def hide_texts(sink: Sink) -> Sink:
    """Return a sink that removes the texts from each event before it calls `sink`.

    Token ids reveal the text, so they become null. Hashes could confirm a guess, so keyed hashes replace them;
    equal hashes stay equal within a trace. Errors may quote a request, so only their types remain.
    """
    key = secrets.token_bytes(16)

    def digest(text: str) -> str:
        return hashlib.blake2b(text.encode(), key=key, digest_size=8).hexdigest()

    def hide(event: Event) -> object:
        event = event | {name: REPLACEMENTS[name](event[name]) for name in REPLACEMENTS.keys() & event.keys()}
        if "hash" in event:
            event["hash"] = digest(event["hash"])
        if event["kind"] == "refused":
            event["why"] = REFUSED
        if event["kind"] == "pools":
            event |= hide_hashes(event)
        if event["kind"] == "snapshot":
            state = event["state"]
            sequences = [seq | {name: nulls(seq[name]) for name in ("tokens", "texts")} for seq in state["sequences"]]
            event["state"] = state | {"sequences": sequences} | hide_hashes(state)
        return sink(event)

    def hide_hashes(pools: Event) -> Event:
        return {
            tier: {block: digest(each) for block, each in pools[tier].items()} for tier in ("cached", "host_cached")
        }

    return hide


def nulls(items: list[Any]) -> list[None]:
    """Return a null for each item.

    >>> nulls([15, 7])
    [None, None]
    """
    return [None] * len(items)


def error_type(error: str | None) -> str | None:
    """Return the type at the start of an error message, or "error" if it has none. Return None for None.

    >>> error_type("ValueError: 'my secret' is not a regular expression")
    'ValueError'
    """
    if error is None:
        return None
    name = error.partition(":")[0]
    return name if name.isidentifier() else "error"


REPLACEMENTS: dict[str, Callable[[Any], Any]] = {  # by key, the function that hides its value
    "tokens": nulls,
    "texts": nulls,
    "token": lambda token: None,
    "text": lambda text: None,
    "error": error_type,
}
