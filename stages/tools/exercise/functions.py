"""A function's place in a source file, so that its body can be shown, compared and swapped; comments stay."""

import ast
import io
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

from ..chain.model import ChainError


class Function(NamedTuple):
    """A source file cut at a function. The four texts end to end are the file."""

    above: str
    head: str  # decorators, signature, docstring
    body: str
    below: str
    indent: str  # of the body

    def body_at(self, indent: str) -> str:
        """The body, indented for another place."""
        body = self.body if self.head.endswith("\n") else f"{self.indent}{self.body.strip()}\n"  # def f(): return 1
        return shift(body, self.indent, indent)

    def with_body(self, body: str) -> str:
        """The file with another body in the place of this one."""
        head = self.head if self.head.endswith("\n") else self.head + "\n"
        return self.above + head + body + self.below


def shift(text: str, old: str, new: str) -> str:
    r"""Swap one indentation for another.

    >>> shift("    if x:\n        y()\n", "    ", "")
    'if x:\n    y()\n'
    """
    return "".join(new + line.removeprefix(old) if line.startswith(old) else line for line in io.StringIO(text))


def find(source: str, name: str) -> Function | None:
    """The function called "name", "Class.method" or "Outer.Inner.method", if the file has it.

    Raises ChainError if the file is not Python, or has two of that name.
    """
    node = find_node(source, name)
    return _cut(source, node) if node else None


def find_node(source: str, name: str) -> ast.FunctionDef | None:
    """The same as a node of the file's tree, with the same errors."""
    try:
        nodes = [node for qualified, node in _functions(ast.parse(source), "") if qualified == name]
    except SyntaxError as error:
        raise ChainError(f"line {error.lineno}: {error.msg}") from None
    if len(nodes) > 1:
        raise ChainError(f"{len(nodes)} functions are called {name}")
    return nodes[0] if nodes else None


def _functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        else:
            yield from _functions(node, f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix)


def _cut(source: str, node: ast.FunctionDef) -> Function:
    lines = io.StringIO(source).readlines()  # str.splitlines would also split at a form feed; Python does not
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
    row, column = _end_of_signature(lines, node.lineno - 1)
    first = node.body[0]
    one_line = first.lineno - 1 == row
    if ast.get_docstring(node) is not None:
        row, column = first.end_lineno or 0, 0
    elif not one_line:
        row, column = row + 1, 0
    head = "".join(lines[start:row]) + (lines[row][:column] if column else "")
    whole, below = "".join(lines[start : node.end_lineno]), "".join(lines[node.end_lineno :])
    indent = " " * (node.col_offset + 4 if one_line else first.col_offset)
    return Function("".join(lines[:start]), head, whole.removeprefix(head), below, indent)


def _end_of_signature(lines: list[str], row: int) -> tuple[int, int]:
    """Line (from 0) and column just behind the colon that ends the signature which begins in line `row`."""
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO("".join(lines[row:])).readline):
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
            if token.string == ":" and depth == 0:
                return row + token.end[0] - 1, token.end[1]
    raise AssertionError("a function that was parsed has a colon behind its signature")
