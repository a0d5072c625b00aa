"""The events as data (EVENTS.md says what they mean), a file of them, and events that hide the texts."""

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Write = Callable[[Event], object]  # takes one event at a time

VERSION = 2
BEGINNING = b'{"kind":"snapshot"'
MAX_CHARACTERS = 1 << 26  # of a line that is read: /dev/zero never ends
COMMON = ("kind", "step", "by")  # a snapshot, pools and a step have no "by"
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
    "pools": ("free", "cached", "host_free", "host_cached"),
    "step": ("began", "seconds", "error"),
}
WITHOUT_BY = ("snapshot", "pools", "step")
WHYS: dict[str, tuple[str, ...]] = {  # a refusal has a sentence instead
    "held_up": ("batch", "seat", "piece", "promise", "blocks", "budget", "preemption"),
    "taken": ("admit", "grow", "copy"),
    "shared": ("fork",),
    "given_back": ("end", "preempt", "abort", "copy"),
    "evicted": ("taken", "reset"),
    "host_evicted": ("taken", "reset"),
    "chunk": ("prefill", "decode", "recompute"),
    "preempt": ("blocks", "step failed", "reset"),
    "end": ("stop", "length", "repetition", "abort", "error", "beam"),
}


# A file


class FileSink:
    """A file of JSON lines. Events are written a step at a time, and each line as a whole or not at all."""

    def __init__(self, path: str | Path) -> None:
        """Open the file; an old trace is replaced when the first event comes.

        Raise ValueError for a file that holds something else, OSError for one that cannot be written.
        """
        self._path, self._is_new, self._is_empty = Path(path), not os.path.exists(path), True
        if self._path.is_file() and os.path.getsize(path) and not is_trace(path):
            raise ValueError(f"{path} exists and is not a trace: it is not replaced")
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0)
        self._events: list[Event] = []
        self._encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

    def __call__(self, event: Event) -> None:
        """Take an event, which nobody changes afterwards."""
        self._events.append(event)
        if event["kind"] in ("step", "snapshot") or len(self._events) >= 1000:
            self._flush()

    def __enter__(self) -> "FileSink":
        return self

    def __exit__(self, *_: object) -> None:
        """Write the remaining events. A new file that got no event is removed."""
        with self._file:
            self._flush()
        if self._is_new and self._is_empty:
            self._path.unlink(missing_ok=True)

    def _flush(self) -> None:
        events, self._events = self._events, []
        if not events:
            return
        # One call for all events is 3 times as fast as one for each. Between quotes, a quote follows a backslash: so
        # the text that is replaced stands between events only.
        array = self._encode(events)
        lines = (array[1:-1].replace('},{"kind":', '}\n{"kind":') + "\n").encode("utf-8", "replace")
        can_cut = self._path.is_file()  # a pipe and a device cannot be cut
        if self._is_empty and can_cut:
            os.ftruncate(self._file.fileno(), 0)
        self._is_empty = False
        start, rest = self._file.tell() if can_cut else 0, memoryview(lines)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            if can_cut:  # after the last whole line
                os.ftruncate(self._file.fileno(), start + lines.rfind(b"\n", 0, len(lines) - len(rest)) + 1)
            raise


def is_trace(path: str | Path) -> bool:
    """Return whether the file begins like a trace, of any version."""
    with open(path, "rb") as file:
        return file.read(len(BEGINNING)) == BEGINNING


def read_trace(path: str | Path) -> Iterator[Event]:
    """Yield the events of a file, the snapshot first. A last line without its end is skipped: its writer was cut off.

    Raise ValueError, with the line's number, for a file that is not a trace or has another version.
    """
    num_events = 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_CHARACTERS), ""), start=1):
            if not line.endswith("\n"):
                break
            try:
                event = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: not JSON: {getattr(error, 'msg', error)}") from None
            if not isinstance(event, dict) or event.get("kind") not in KEYS:
                raise ValueError(f"{path}, line {number}: not an event of a trace: {line[:60].strip()}")
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


# Without the texts: for a page that shows a server's memory to people who must not read what is in it

REFUSED = "it can never be served"


def hide_texts(write: Write) -> Write:
    """Return a sink that hides the texts of each event and passes it on to `write`.

    A token id is as good as its text, and a hash confirms a text that somebody has guessed: token ids become null, and
    hashes others, the same for the same text until the trace ends. An error may quote a request: its type is left.
    """
    key = secrets.token_bytes(16)

    def digest(text: str) -> str:
        return hashlib.blake2b(text.encode(), key=key, digest_size=8).hexdigest()

    def hide(event: Event) -> object:
        event = event | {name: HIDDEN[name](event[name]) for name in HIDDEN.keys() & event.keys()}
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
        return write(event)

    def hide_hashes(pools: Event) -> Event:
        return {
            tier: {block: digest(each) for block, each in pools[tier].items()} for tier in ("cached", "host_cached")
        }

    return hide


def nulls(items: list[Any]) -> list[None]:
    """Return as many nulls.

    >>> nulls([15, 7])
    [None, None]
    """
    return [None] * len(items)


def type_of(error: str | None) -> str | None:
    """Return the type of an error that is given in words.

    >>> type_of("ValueError: 'my secret' is no regular expression")
    'ValueError'
    """
    if error is None:
        return None
    name = error.partition(":")[0]
    return name if name.isidentifier() else "error"


HIDDEN: dict[str, Callable[[Any], Any]] = {
    "tokens": nulls,
    "texts": nulls,
    "token": lambda token: None,
    "text": lambda text: None,
    "error": type_of,
}
