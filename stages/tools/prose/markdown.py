"""Tables in Markdown."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from stages.tools.prose.figures import Figure, figure


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table.

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
    is_ratio: bool = False  # so that it may be "the same"

    def cell(self, row: Mapping[str, Any]) -> str:
        """Return the number of a row, or a dash."""
        if self.key not in row:
            return "-"
        value = figure(row, self.key)
        if not isinstance(value, Figure):
            return self.show(value)
        return value.compared(self.show) if self.is_ratio else value.shown(self.show)


def table_of(first: str, columns: Sequence[Column], rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table with one line per row. A column that no row has is left out.

    >>> print(table_of("stage", [Column("seats", "n", str), Column("steps", "m", str)], {"s1": {"n": 3}}), end="")
    | stage | seats |
    |---|---|
    | s1 | 3 |
    """
    shown = [column for column in columns if any(column.key in row for row in rows.values())]
    lines = [[name, *(column.cell(row) for column in shown)] for name, row in rows.items()]
    return table([first, *(column.name for column in shown)], lines)


def mib(size: float) -> str:
    """Return a size in bytes as MiB.

    >>> mib(3 * 2**20)
    '3.0 MiB'
    """
    return f"{size / 2**20:.1f} MiB"


def whole(number: float) -> str:
    """Return a number without decimals.

    >>> whole(1200.0)
    '1,200'
    """
    return f"{number:,.0f}"


def duration(seconds: float) -> str:
    """Return a duration in milliseconds, or in seconds from one second on.

    >>> duration(0.0804), duration(7.826)
    ('80 ms', '7.8 s')
    """
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
