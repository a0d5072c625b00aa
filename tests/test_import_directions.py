"""Arrows go one way: stages <- models <- stages.bench <- notebooks. The tools of the chain import neither, and no
stage imports any of them, nor another stage. The imports are read from the files; nothing is imported.
"""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers import ROOT

# Each part of the repository, and the parts that it may import. The longest name that fits a module is its part.
MAY_IMPORT: dict[str, set[str]] = {
    "stages.__main__": {"nanovllm"},  # the trace alone, and only when it is asked for: see below
    "stages.tools.chain": set(),
    "stages.tools.exercise": {"stages.tools.chain"},
    "stages.bench": {"stage", "models", "nanovllm"},
    "stages.tools.prose": {"stages.tools.chain"},
    "models": {"stage"},
    "nanovllm": set(),
    "notebooks": {"stage", "models", "stages.bench", "nanovllm"},
}

MEASURING = {*MAY_IMPORT} - {"stages.__main__", "nanovllm"}


def part_of(module: str) -> str | None:
    """A part of MAY_IMPORT; "stage" for a stage; None for what is outside of them.

    >>> [part_of(name) for name in ("stages.s3_paged_attention.llm", "stages.bench.predict.s1", "torch", "stages")]
    ['stage', 'stages.bench', None, None]
    """
    first, _, rest = module.partition(".")
    if first == "stages" and rest[:1] == "s" and rest[1:2].isdigit():
        return "stage"
    fitting = [part for part in MAY_IMPORT if module == part or module.startswith(f"{part}.")]
    return max(fitting, key=len, default=None)


def imports(path: Path, package: str) -> Iterator[str]:
    """The modules that a file of `package` names, wherever in it, as absolute names."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        yield from imports_of(node, package)


def imports_of(node: ast.AST, package: str) -> Iterator[str]:
    """What a statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*parents, *([node.module] if node.module else [])])
        yield from (f"{base}.{alias.name}" for alias in node.names)  # a name in a module, or a module in a package


def files() -> Iterator[tuple[str, str, Path]]:
    """Module, package and path of every file but tests, which may import all."""
    for top in ("stages", "models", "nanovllm", "notebooks"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if "tests" not in parts:
                yield ".".join(parts), ".".join(parts[:-1]), path


MODULES = list(files())


@pytest.mark.parametrize("part", [*MAY_IMPORT, "stage"])
def test_a_part_imports_those_before_it_alone(part):
    allowed = MAY_IMPORT.get(part, set()) | {part, None}
    found = [
        f"{module} imports {name}"
        for module, package, path in MODULES
        if part_of(module) == part
        for name in imports(path, package)
        if part_of(name) not in allowed
    ]
    assert found == []


def test_no_stage_imports_another():
    found = [
        f"{module} imports {name}"
        for module, package, path in MODULES
        if part_of(module) == "stage"
        for name in imports(path, package)
        if part_of(name) == "stage" and name.split(".")[1] != module.split(".")[1]
    ]
    assert found == []


def test_the_command_of_all_stages_imports_the_trace_alone_and_only_when_it_is_asked_for():
    [(package, path)] = [(package, path) for module, package, path in MODULES if module == "stages.__main__"]
    assert [name for name in imports(path, package) if part_of(name)] == [
        "nanovllm.trace.Tracer",
        "nanovllm.trace.traced",
    ]
    at_once = [name for node in ast.parse(path.read_text()).body for name in imports_of(node, package)]
    assert "sys" in at_once and "nanovllm.trace.traced" not in at_once


def test_there_is_no_circle():
    """Of modules, not of parts: a module in a package is imported by its own name, a name in it by the module's."""
    known = {module.removesuffix(".__init__"): (package, path) for module, package, path in MODULES}
    graph = {
        module: {
            found
            for name in imports(path, package)
            for found in [name if name in known else name.rpartition(".")[0]]
            if found in known and found != module and part_of(found) in MEASURING
        }
        for module, (package, path) in known.items()
        if part_of(module) in MEASURING and path.name != "__init__.py"
    }
    assert len(graph) > 30
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_nothing_that_measures_asks_what_a_stage_calls_its_parts():
    """Every stage calls them by the same names: no hasattr, and no getattr with a value for what is not there."""
    calls = [
        (module, node)
        for module, _, path in MODULES
        if part_of(module) == "stages.bench"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    assert len(calls) > 100
    asking = [(module, node) for module, node in calls if node.func.id == "hasattr" or len(node.args) == 3]
    assert [module for module, node in asking if node.func.id in ("hasattr", "getattr")] == []
