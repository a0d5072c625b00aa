"""The clients of clients.toml, the results of their programs, and the table of both in nanovllm/docs/clients.md."""

import ast
import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
PAGE = HERE.parents[1] / "docs" / "clients.md"
BLOCK = re.compile(r"(?<=<!-- figures: clients -->\n).*?(?=<!-- /figures -->)", re.DOTALL)
HEAD = "| client | version | works | fails |\n|---|---|---|---|\n"
MAX_CHARACTERS = 200  # of a reason in the table


@dataclass(frozen=True)
class Client:
    """A section of clients.toml."""

    name: str
    program: str
    requires: Sequence[str]
    server: str
    only: str = ""

    @property
    def path(self) -> Path:
        return PROGRAMS / self.program

    @property
    def is_python(self) -> bool:
        return self.path.suffix == ".py"

    @property
    def version(self) -> str:
        """The version of its first package."""
        package, _, version = self.requires[0].partition("==")
        return version or str(json.loads((HERE / "package.json").read_text())["dependencies"][package])

    @property
    def functions(self) -> list[str]:
        """The names of the functions that a run calls."""
        text = self.path.read_text()
        if self.is_python:
            functions = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
            names = [name for name in functions if name.startswith("try_")]
        else:
            names = re.findall(r"^export async function (\w+)", text, re.MULTILINE)
        return [name for name in names if self.only in name]


class Result(NamedTuple):
    """The outcome of a function: an error, or None if it works."""

    function: str
    error: str | None


def clients() -> list[Client]:
    """Return all clients in the order of clients.toml."""
    return [Client(**section) for section in tomllib.loads((HERE / "clients.toml").read_text())["client"]]


def words_of(function: str) -> str:
    """Return a function's name as words.

    >>> words_of("try_streamed_chat"), words_of("streamedChat"), words_of("try_RESPONSES_TOOLS_in_a_stream")
    ('streamed chat', 'streamed chat', 'RESPONSES_TOOLS in a stream')
    """
    if not function.startswith("try_"):
        return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", function).lower()
    return re.sub(r"(?<![A-Z])_|_(?![A-Z])", " ", function.removeprefix("try_"))


def row(client: Client, results: Sequence[Result]) -> str:
    """Return a line of the table."""
    works = ", ".join(words_of(each.function) for each in results if each.error is None)
    fails = "; ".join(f"{words_of(each.function)} ({reason(each.error)})" for each in results if each.error is not None)
    return f"| {client.name} | {client.version} | {works} | {fails} |\n"


def reason(error: str) -> str:
    r"""Return the first line of an error, short enough for a table.

    >>> reason("AssertionError: a | b\nmore")
    'AssertionError: a / b'
    """
    return error.strip().partition("\n")[0].replace("|", "/")[:MAX_CHARACTERS]


def render(page: str, rows: Sequence[str]) -> str:
    """Return the page with these rows in its table."""
    return BLOCK.sub(lambda _: HEAD + "".join(rows), page)


def rows_of(page: str) -> list[list[str]]:
    """Return the cells of the table on a page."""
    match = BLOCK.search(page)
    assert match is not None and match[0].startswith(HEAD), "the page has a table of clients"
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in match[0].removeprefix(HEAD).splitlines()]
