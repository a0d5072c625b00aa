"""Files of the last stage that the package splits into several, and the part that belongs in each."""

import ast
from collections.abc import Iterator, Mapping

from .model import ChainError, Change, Link, Package


def old_text(link: Link, change: Change) -> str:
    """Return the text that a change starts from: the previous stage's file, or the part of it that belongs here."""
    if link.before is None:
        return ""
    file = link.old_name(change)
    content = link.before.text(file)
    return part(link, file, change.file, content) if isinstance(link, Package) else content


def part(package: Package, file: str, place: str, content: str) -> str:
    """Return the part of the last stage's `file`, which holds `content`, that the package keeps at `place`."""
    places = package.places(file)
    if place not in places or len(places) == 1:  # removed, or not split
        return content
    return split(content, {each: package.text(each) for each in places})[place]


def split(source: str, targets: Mapping[str, str]) -> dict[str, str]:
    r"""Return the part of `source` that belongs in each target file.

    A top-level definition belongs in the targets that define the same name. If none does, it stays with the definition
    above it. The module's docstring and imports belong in every target.

    >>> split("import math\n\nx = 1\n\n# why\ndef f(): pass\n", {"a.py": "def f(): return 1", "b.py": "x = 2"})
    {'a.py': 'import math\n\n# why\ndef f(): pass\n', 'b.py': 'import math\n\nx = 1\n'}
    """
    names = {
        target: {name for _, each in _statements(text, target) for name in each} for target, text in targets.items()
    }
    parts = dict.fromkeys(targets, "")
    holders = [next(iter(targets))]
    for text, defined in _statements(source, "the file to split"):
        if defined and (matches := [target for target in targets if names[target] & defined]):
            holders = matches
        for target in holders if defined else targets:
            parts[target] += text
    return parts


def _statements(source: str, file: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each top-level statement with the blank lines and comments above it, and the names that it defines."""
    try:
        nodes = ast.parse(source).body
    except SyntaxError as error:
        raise ChainError(f"{file} is not a Python file: line {error.lineno}, {error.msg}") from None
    lines = source.splitlines(keepends=True)
    start = 0
    for node in nodes:
        end = len(lines) if node is nodes[-1] else node.end_lineno or start
        yield "".join(lines[start:end]), set(_defined(node))
        start = end


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
