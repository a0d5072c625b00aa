"""A function's place in a source file. Its body can be shown, compared and swapped, and comments are kept.

missing_names() tells whether the previous stage's body still fits.
"""

import ast
import builtins
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
        """Return the body, indented for another place."""
        body = self.body if self.head.endswith("\n") else f"{self.indent}{self.body.strip()}\n"  # def f(): return 1
        return shift(body, self.indent, indent)

    def with_body(self, body: str) -> str:
        """Return the file with a different body for this function."""
        head = self.head if self.head.endswith("\n") else self.head + "\n"
        return self.above + head + body + self.below


def shift(text: str, old: str, new: str) -> str:
    r"""Swap one indentation for another.

    >>> shift("    if x:\n        y()\n", "    ", "")
    'if x:\n    y()\n'
    """
    return "".join(new + line.removeprefix(old) if line.startswith(old) else line for line in io.StringIO(text))


def find(source: str, name: str) -> Function | None:
    """Return the function called "name", "Class.method" or "Outer.Inner.method", or None.

    Raise ChainError if the file is not Python, or has two of that name.
    """
    node = find_node(source, name)
    return _cut(source, node) if node else None


def find_node(source: str, name: str) -> ast.FunctionDef | None:
    """Return the same function as a node of the file's tree; raise the same errors."""
    try:
        nodes = [node for qualified, node in find_names(ast.parse(source)) if qualified == name]
    except SyntaxError as error:
        raise ChainError(f"line {error.lineno}: {error.msg}") from None
    if len(nodes) > 1:
        raise ChainError(f"{len(nodes)} functions are called {name}")
    return nodes[0] if nodes else None


def find_names(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of a module or a class, and of the classes in it, with their dotted names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        else:
            yield from find_names(node, f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix)


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
    """Return the line (from 0) and the column after the colon that ends the signature beginning in line `row`."""
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO("".join(lines[row:])).readline):
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
            if token.string == ":" and depth == 0:
                return row + token.end[0] - 1, token.end[1]
    raise AssertionError("a parsed function has a colon after its signature")


def missing_names(name: str, before: str, now: str) -> list[str]:
    r"""Return the names that the body of function `name` uses in the file `before`, and that are not in the file `now`.

    These are parameters, attributes of `self`, and names of the module; other objects are not examined.

    >>> missing_names("f", "def f(count): return min(count, MAX)", "def f(size): return 1")
    ['the parameter count', 'MAX']
    >>> before = "class Pool:\n def size(self): return self.free"
    >>> missing_names("Pool.size", before, "class Pool:\n def size(self): return 1")
    ['self.free']
    """
    old, new, tree = find_node(before, name), find_node(now, name), ast.parse(now)
    assert old and new, f"{name} is in both stages"
    own = {id(node) for node in ast.walk(new)}
    others = [node for node in ast.walk(tree) if id(node) not in own]
    attributes = {each for node in others for each in _names_of(node)}
    used = [node for statement in old.body for node in ast.walk(statement)]
    local = {node.id for node in used if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    local |= {node.arg for node in used if isinstance(node, ast.arg)}
    known = local | _parameters(new) | _module_names(tree) | {*dir(builtins)} | {f"self.{each}" for each in attributes}
    missing = [each for node in used if (each := _named(node)) and each not in known]
    return [f"the parameter {each}" if each in _parameters(old) else each for each in dict.fromkeys(missing)]


def _named(node: ast.AST) -> str:
    """Return the name that a node uses, such as "self.free" or "len"; an empty string if it uses none."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return f"self.{node.attr}"
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else ""


def _names_of(node: ast.AST) -> Iterator[str]:
    """Yield the attributes that a node uses or defines."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def _parameters(node: ast.FunctionDef) -> set[str]:
    return {arg.arg for arg in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]}


def _module_names(tree: ast.Module) -> set[str]:
    """Return the names that the module defines and imports."""
    imported = (alias for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names)
    assignments = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    assigned = (node.id for target in assignments for node in ast.walk(target) if isinstance(node, ast.Name))
    defined = (node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    return {alias.asname or alias.name for alias in imported} | {*assigned} | {*defined}
