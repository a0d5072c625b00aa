"""Events without the texts: for a page that shows a server's memory to people who must not read what is in it.

A token's id is its text, and a hash confirms a text that somebody has guessed: neither is told. An error may quote a
request: only its type is told.
"""

import hashlib
import secrets
from collections.abc import Callable
from typing import Any

Event = dict[str, Any]
REFUSED = "it can never be served"


def hidden(write: Callable[[Event], object]) -> Callable[[Event], object]:
    """A sink that hides the texts, and then writes. The same text has the same hash, until the trace ends."""
    key = secrets.token_bytes(16)

    def digest(text: str) -> str:
        return hashlib.blake2b(text.encode(), key=key, digest_size=8).hexdigest()

    def hide(event: Event) -> object:
        event = event | {name: HIDDEN[name](event[name]) for name in HIDDEN.keys() & event.keys()}
        if "hash" in event:
            event["hash"] = digest(event["hash"])
        if event["kind"] == "refused":
            event["why"] = REFUSED
        if event["kind"] == "snapshot":
            event["state"] = without_texts(event["state"], digest)
        return write(event)

    return hide


def without_texts(state: Event, digest: Callable[[str], str]) -> Event:
    """A snapshot's."""
    sequences = [seq | {name: nothing(seq[name]) for name in ("tokens", "texts")} for seq in state["sequences"]]
    hashes = {tier: {block: digest(text) for block, text in state[tier].items()} for tier in ("cached", "host_cached")}
    return state | {"sequences": sequences} | hashes


def nothing(items: list[Any]) -> list[None]:
    """
    >>> nothing([15, 7])
    [None, None]
    """
    return [None] * len(items)


def type_of(error: str | None) -> str | None:
    """
    >>> type_of("ValueError: 'my secret' is no regular expression")
    'ValueError'
    """
    if error is None:
        return None
    name = error.partition(":")[0]
    return name if name.isidentifier() else "error"


HIDDEN: dict[str, Callable[[Any], Any]] = {
    "tokens": nothing,
    "texts": nothing,
    "token": lambda token: None,
    "text": lambda text: None,
    "error": type_of,
}
