"""The compact form of recorded runs, as page/unpack.js reads it: a row for each event, each text once."""

from collections.abc import Iterable
from typing import Any

from nanovllm.trace.events import KEYS, WITHOUT_BY
from notebooks.page.record import TIMES, Event

LEFT_OUT = ("kind", "step", *TIMES)  # the kind is the row's first number, steps are counted, clocks differ
TEXTS = ("seq", "request", "carried_by", "why", "by", "hash", "for", "behind", "was", "place", "text", "error")


def columns(kind: str) -> list[str]:
    """The columns of a kind of event; a $ behind the name says that a text stands there as a number."""
    names = [name for name in KEYS[kind] if name not in LEFT_OUT]
    names += [] if kind in WITHOUT_BY else ["by"]
    return [f"{name}$" if is_text(kind, name) else name for name in names]


def is_text(kind: str, name: str) -> bool:
    """`from` is a sequence where one is forked or shared, and else a block."""
    return name in TEXTS or (name == "from" and kind in ("forked", "shared"))


class Packer:
    """Texts are numbered by how they come: the same runs give the same numbers."""

    def __init__(self) -> None:
        self.kinds = {kind: columns(kind) for kind in KEYS if kind != "snapshot"}
        self._numbers = {kind: number for number, kind in enumerate(self.kinds)}
        self._strings: dict[str, int] = {}

    @property
    def strings(self) -> list[str]:
        return list(self._strings)

    def pack(self, events: Iterable[Event]) -> list[list[Any]]:
        return [self._row(event) for event in events]

    def _row(self, event: Event) -> list[Any]:
        row = [self._value(column, event) for column in self.kinds[event["kind"]]]
        while row and row[-1] is None:
            row.pop()
        return [self._numbers[event["kind"]], *row]

    def _value(self, column: str, event: Event) -> Any:
        value = event.get(column.rstrip("$"))
        if column.endswith("$") and value is not None:
            return self._strings.setdefault(value, len(self._strings))
        return value


def unpack(kinds: dict[str, list[str]], strings: list[str], rows: Iterable[list[Any]]) -> Iterable[Event]:
    """The events again, but for their clocks."""
    names, step = list(kinds), 1
    for number, *values in rows:
        kind = names[number]
        padded = values + [None] * (len(kinds[kind]) - len(values))
        event: Event = {"kind": kind, "step": step}
        for column, value in zip(kinds[kind], padded, strict=True):
            is_number = column.endswith("$") and value is not None
            event[column.rstrip("$")] = strings[value] if is_number else value
        yield event
        step += kind == "step"
