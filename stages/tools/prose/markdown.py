"""Tables in Markdown."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table.

    >>> print(table(["a", "b"], [["1", "2"]]), end="")
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    lines.insert(1, "|" + "---|" * len(header))
    return "\n".join(lines) + "\n"


class Column(NamedTuple):
    """A number of a table: its heading, its key in a row of results.json, and how it is written."""

    name: str
    key: str
    show: Callable[[Any], str]


def table_of(first: str, columns: Sequence[Column], rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A line a row. A column that no row has is left out; a dash stands for a number that a row does not have.

    >>> print(table_of("stage", [Column("seats", "n", str), Column("steps", "m", str)], {"s1": {"n": 3}}), end="")
    | stage | seats |
    |---|---|
    | s1 | 3 |
    """
    shown = [column for column in columns if any(column.key in row for row in rows.values())]
    lines = [[name, *(c.show(row[c.key]) if c.key in row else "-" for c in shown)] for name, row in rows.items()]
    return table([first, *(column.name for column in shown)], lines)


def look_up(results: Mapping[str, Any], key: str) -> Any:
    """What stands under a key. Raises KeyError.

    >>> look_up({"a": {"b": 4}}, "a.b")
    4
    """
    found: Any = results
    for part in key.split("."):
        if not isinstance(found, Mapping):
            raise KeyError(key)
        found = found[part]
    return found


def mib(size: float) -> str:
    """
    >>> mib(3 * 2**20)
    '3.0 MiB'
    """
    return f"{size / 2**20:.1f} MiB"


def whole(number: float) -> str:
    """
    >>> whole(1200.0)
    '1,200'
    """
    return f"{number:,.0f}"


def duration(seconds: float) -> str:
    """
    >>> duration(0.0804), duration(7.826)
    ('80 ms', '7.8 s')
    """
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
