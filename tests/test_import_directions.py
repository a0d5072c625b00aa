"""Imports go one way: stages <- models <- stages.bench <- notebooks.

The tools of the chain import none of these, and a stage imports neither them nor another stage. The tests parse the
files and import nothing.
"""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers import ROOT

# The parts of the repository, and the parts that each may import. A module belongs to the longest matching name.
MAY_IMPORT: dict[str, set[str]] = {
    "stages.__main__": {"nanovllm"},  # the trace alone, and only for --trace: see below
    "stages.tools.chain": set(),
    "stages.tools.exercise": {"stages.tools.chain"},
    "stages.bench": {"stage", "models", "nanovllm"},
    "stages.tools.prose": {"stages.tools.chain"},
    "models": {"stage", "nanovllm"},
    "nanovllm": set(),
    "notebooks": {"stage", "models", "stages.bench", "stages.tools.prose", "nanovllm"},
    "notebooks.page": {"notebooks", "stage", "stages.bench", "stages.tools.chain", "stages.tools.exercise", "nanovllm"},
}

MEASURING = {*MAY_IMPORT} - {"stages.__main__", "nanovllm"}


def part_of(module: str) -> str | None:
    """Return the part of a module: a key of MAY_IMPORT, "stage", or None for anything else.

    >>> [part_of(name) for name in ("stages.s3_paged_attention.llm", "stages.bench.predict.s1", "torch", "stages")]
    ['stage', 'stages.bench', None, None]
    """
    first, _, rest = module.partition(".")
    if first == "stages" and rest[:1] == "s" and rest[1:2].isdigit():
        return "stage"
    matches = [part for part in MAY_IMPORT if module == part or module.startswith(f"{part}.")]
    return max(matches, key=len, default=None)


def imports(path: Path, package: str) -> Iterator[str]:
    """Yield the absolute names of all modules that a file of `package` imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        yield from imports_of(node, package)


def imports_of(node: ast.AST, package: str) -> Iterator[str]:
    """Yield the names that a statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*parents, *([node.module] if node.module else [])])
        yield from (f"{base}.{alias.name}" for alias in node.names)  # a name in a module, or a module in a package


def files() -> Iterator[tuple[str, str, Path]]:
    """Yield the module, package and path of every file but tests, which may import anything."""
    for top in ("stages", "models", "nanovllm", "notebooks"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if "tests" not in parts:
                yield ".".join(parts), ".".join(parts[:-1]), path


MODULES = list(files())


@pytest.mark.parametrize("part", [*MAY_IMPORT, "stage"])
def test_part_imports_only_earlier_parts(part):
    allowed = MAY_IMPORT.get(part, set()) | {part, None}
    faults = [
        f"{module} imports {name}"
        for module, package, path in MODULES
        if part_of(module) == part
        for name in imports(path, package)
        if part_of(name) not in allowed
    ]
    assert faults == []


def test_no_stage_imports_another():
    faults = [
        f"{module} imports {name}"
        for module, package, path in MODULES
        if part_of(module) == "stage"
        for name in imports(path, package)
        if part_of(name) == "stage" and name.split(".")[1] != module.split(".")[1]
    ]
    assert faults == []


def test_command_imports_only_the_trace_and_only_when_needed():
    [(package, path)] = [(package, path) for module, package, path in MODULES if module == "stages.__main__"]
    assert [name for name in imports(path, package) if part_of(name)] == [
        "nanovllm.trace.Tracer",
        "nanovllm.trace.traced",
    ]
    at_once = [name for node in ast.parse(path.read_text()).body for name in imports_of(node, package)]
    assert "sys" in at_once and "nanovllm.trace.traced" not in at_once


def test_modules_have_no_import_cycles():
    """Look up an imported name as a module first, and then in the module before its last dot."""
    known = {module.removesuffix(".__init__"): (package, path) for module, package, path in MODULES}
    graph = {
        module: {
            imported
            for name in imports(path, package)
            for imported in [name if name in known else name.rpartition(".")[0]]
            if imported in known and imported != module and part_of(imported) in MEASURING
        }
        for module, (package, path) in known.items()
        if part_of(module) in MEASURING and path.name != "__init__.py"
    }
    assert len(graph) > 30
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle


def test_benches_never_probe_a_stage_for_attributes():
    """All stages use the same names, so the benches need no hasattr() and no getattr() with a default."""
    calls = [
        (module, node)
        for module, _, path in MODULES
        if part_of(module) == "stages.bench"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    assert len(calls) > 100
    probes = [(module, node) for module, node in calls if node.func.id == "hasattr" or len(node.args) == 3]
    assert [module for module, node in probes if node.func.id in ("hasattr", "getattr")] == []
