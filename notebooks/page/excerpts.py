"""The source of the functions that events name: found by symbol in a stage's files when the page is made."""

import ast
from pathlib import Path

from notebooks.page.workload import ROOT


def excerpts(folder: Path, names: set[str]) -> dict[str, dict[str, str | int]]:
    """{"BlockPool.touch": {"file", "line", "text"}, ...}. Raises ValueError for a name that no file has."""
    found: dict[str, dict[str, str | int]] = {}
    for path in sorted(folder.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        for name, node in functions(ast.parse(source)):
            if name in names and name not in found:
                text = source_of(source, node)
                found[name] = {"file": path.relative_to(ROOT).as_posix(), "line": node.lineno, "text": text}
    if missing := names - set(found):
        raise ValueError(f"{folder.name} has no {', '.join(sorted(missing))}")
    return dict(sorted(found.items()))


def functions(tree: ast.Module) -> list[tuple[str, ast.FunctionDef]]:
    """(qualified name, node) of each function of a module and each method of its classes."""
    found = [(node.name, node) for node in tree.body if isinstance(node, ast.FunctionDef)]
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef):
            found += [(f"{owner.name}.{node.name}", node) for node in owner.body if isinstance(node, ast.FunctionDef)]
    return found


def source_of(source: str, node: ast.FunctionDef) -> str:
    """Its lines, moved to the left margin.

    >>> source = "class A:\\n    def f(self) -> None:\\n        pass"
    >>> print(source_of(source, ast.parse(source).body[0].body[0]))
    def f(self) -> None:
        pass
    """
    lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
    return "\n".join(line[node.col_offset :] for line in lines)
