"""Rules of the package: one-way imports, no private imports, no casts, no overridden internals, size."""

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1]
PREFIX = "nanovllm."


class Import(NamedTuple):
    module: str  # relative to the package: "engine.scheduler", or "" for the package itself
    name: str | None  # the name that is imported from the module
    line: int


def sources(package: Path) -> dict[str, ast.Module]:
    """Return the parsed modules of a package by path, without its tests."""
    paths = [path.relative_to(package) for path in sorted(package.rglob("*.py"))]
    return {path.as_posix(): ast.parse((package / path).read_text()) for path in paths if path.parts[0] != "tests"}


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    return sources(PACKAGE)


# Imports


def is_for_types(node: ast.AST) -> bool:
    """Return whether this is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


@cache
def nodes_of(tree: ast.AST, with_types: bool = False) -> list[ast.AST]:
    """Return all nodes, including those in functions, except those for type checkers."""
    nodes = [tree]
    for node in nodes:  # it grows
        children = ast.iter_child_nodes(node)
        nodes += [child for child in children if with_types or not is_for_types(child)]
    return nodes


def imports_of(path: str, tree: ast.Module, with_types: bool = False) -> Iterator[Import]:
    """Yield the imports of the package's own modules that Python runs, on import or in a function call."""
    folder = path.split("/")[:-1]
    for node in nodes_of(tree, with_types):
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names if f"{each.name}.".startswith(PREFIX)]
            yield from (Import(name.removeprefix(PREFIX), None, node.lineno) for name in names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = ".".join([*folder[: len(folder) - node.level + 1], *([module] if module else [])])
            elif f"{module}.".startswith(PREFIX):
                module = f"{module}.".removeprefix(PREFIX).rstrip(".")
            else:
                continue
            yield from (Import(module, each.name, node.lineno) for each in node.names)


def folder_imports(modules: dict[str, ast.Module]) -> dict[str, dict[str, str]]:
    """Return the folders that each folder imports, with one place where it does so.

    A module outside any folder counts as a folder.
    """
    face = {each.name: each.module for each in imports_of("__init__.py", modules["__init__.py"], with_types=True)}
    folders = {Path(path).with_suffix("").parts[0] for path in modules}
    graph: dict[str, dict[str, str]] = {}
    for path, tree in modules.items():
        own = Path(path).with_suffix("").parts[0]
        for module, name, line in imports_of(path, tree):
            if not module:  # from .. import name: a module, or a public name that the package imports on first use
                module = face.get(name, name or "")
            other = module.split(".")[0]
            if other != own and other in folders:
                graph.setdefault(own, {}).setdefault(other, f"{path}:{line}")
    return graph


def cycle_in(graph: dict[str, dict[str, str]]) -> list[str]:
    """Return the imports that form a cycle, or an empty list."""
    done: set[str] = set()

    def visit(folder: str, way: list[str]) -> list[str]:
        if folder in way:
            cycle = [*way[way.index(folder) :], folder]
            return [f"{graph[a][b]} imports {b}" for a, b in pairwise(cycle)]
        if folder in done:
            return []
        for other in graph.get(folder, {}):
            if found := visit(other, [*way, folder]):
                return found
        done.add(folder)
        return []

    return next((found for folder in graph if (found := visit(folder, []))), [])


def test_folders_import_each_other_in_one_direction(modules):
    graph = folder_imports(modules)
    assert {"llama", "backends", "engine"} <= {*graph} | {other for others in graph.values() for other in others}
    assert cycle_in(graph) == []


def parsed(files: dict[str, str]) -> dict[str, ast.Module]:
    return {path: ast.parse(text) for path, text in files.items()}


@pytest.mark.parametrize(
    ("engine", "backends", "is_cycle"),
    [
        ("from ..backends import torch", "x = 1", False),
        ("from ..backends.torch import run", "from ..engine import sequence", True),
        ("from ..backends.torch import run", "def f():\n    from nanovllm.engine.sequence import Sequence", True),
        ("from ..backends.torch import run", "import nanovllm.engine.sequence", True),
        ("from ..backends.torch import run", "from .. import LLMEngine", True),
        ("from ..backends.torch import run", "from .. import __version__", False),
        (
            "from ..backends.torch import run",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..engine import sequence",
            False,
        ),
    ],
)
def test_import_cycle_is_found_wherever_the_imports_are(engine, backends, is_cycle):
    face = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .engine.llm_engine import LLMEngine"
    files = {
        "__init__.py": face,
        "llm_engine.py": engine,
        "engine/sequence.py": "",
        "backends/torch.py": backends,
    }
    assert bool(cycle_in(folder_imports(parsed(files)))) == is_cycle


# Private names


def private_imports(path: str, tree: ast.Module) -> list[str]:
    """Return the private names that a module imports from other modules of the package."""
    names = [each for each in imports_of(path, tree, with_types=True) if each.name and each.name.startswith("_")]
    return [f"{path}:{each.line} {each.name}" for each in names if not each.name.startswith("__")]


def casts(path: str, tree: ast.Module) -> list[str]:
    calls = [node for node in nodes_of(tree, with_types=True) if isinstance(node, ast.Call)]
    return [f"{path}:{node.lineno}" for node in calls if ast.unparse(node.func) in ("cast", "typing.cast")]


def test_no_module_imports_private_names_of_others(modules):
    assert [each for path, tree in modules.items() for each in private_imports(path, tree)] == []


def test_no_type_is_cast(modules):
    assert [each for path, tree in modules.items() for each in casts(path, tree)] == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("from ..engine.scheduler import _needed", 1),
        ("from ..engine.scheduler import needed", 0),
        ("from typing import cast\nx = cast(int, '1')", 1),
        ("import typing\nx = typing.cast(int, '1')", 1),
    ],
)
def test_private_name_or_cast_is_found(text, count):
    path, tree = "cli/a.py", ast.parse(text)
    assert len(private_imports(path, tree) + casts(path, tree)) == count


# Overridden internals


class Class(NamedTuple):
    path: str
    name: str
    bases: list[str]
    private: set[str]


def classes_of(modules: dict[str, ast.Module]) -> list[Class]:
    return [
        Class(
            path,
            node.name,
            [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases],
            private_methods(node),
        )
        for path, tree in modules.items()
        for node in nodes_of(tree, with_types=True)
        if isinstance(node, ast.ClassDef)
    ]


def private_methods(node: ast.ClassDef) -> set[str]:
    methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    return {name for name in methods if name.startswith("_") and not name.startswith("__")}


def alias_of(path: str, tree: ast.Module) -> dict[str, str]:
    """Return the original name of each class that a module imports under another one."""
    nodes = [node for node in nodes_of(tree, with_types=True) if isinstance(node, ast.ImportFrom)]
    return {each.asname: each.name for node in nodes for each in node.names if each.asname}


def overridden(modules: dict[str, ast.Module]) -> list[str]:
    """Return the private methods of the package's classes that a subclass overrides. Class names are unique."""
    classes, aliases = classes_of(modules), {path: alias_of(path, tree) for path, tree in modules.items()}

    def inherited(each: Class, seen: Iterable[str] = ()) -> set[str]:
        names = {aliases[each.path].get(base, base) for base in each.bases} - {*seen}
        bases = [other for other in classes if other.name in names and other is not each]
        return {name for base in bases for name in base.private | inherited(base, [*seen, *names])}

    return [f"{each.path} {each.name}.{name}" for each in classes for name in sorted(each.private & inherited(each))]


def test_no_class_overrides_a_private_method(modules):
    assert overridden(modules) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from ..engine.a import A\nclass B(A):\n    def _run(self): ...", ["cli/b.py B._run"]),
        ("from ..engine.a import A as Base\nclass A(Base):\n    def _run(self): ...", ["cli/b.py A._run"]),
        ("from ..engine.a import C\nclass B(C):\n    def _run(self): ...", ["cli/b.py B._run"]),
        ("from ..engine.a import A\nclass B(A):\n    def run(self): ...\n    def __len__(self): ...", []),
        ("from threading import A\nclass B:\n    def _run(self): ...", []),
    ],
)
def test_overridden_private_method_is_found(text, expected):
    base = "class A:\n    def _run(self): ...\n    def run(self): ...\nclass C(A): ..."
    assert overridden(parsed({"engine/a.py": base, "cli/b.py": text})) == expected


# Size: later issues raise the ceiling of lines by what they state.

MAX_FILES, MAX_LINES = 190, 20_550
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str, tree: ast.Module | None = None) -> int:
    r"""Return the number of lines of code, without blank lines, comments and docstrings.

    >>> code_lines("def f():\n    'Return 1.'\n\n    return (  # one\n        1\n    )\n")
    4
    """
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    all_nodes = nodes_of(tree or ast.parse(source), with_types=True)
    nodes = [node for node in all_nodes if isinstance(node, owners)]
    docstrings = [node.body[0] for node in nodes if ast.get_docstring(node, clean=False) is not None]
    prose = {line for node in docstrings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {line for token in tokens if token.type not in NOT_CODE for line in range(token.start[0], token.end[0] + 1)}
    return len(code - prose)


def test_package_stays_small(modules):
    num_lines = sum(code_lines((PACKAGE / path).read_text(encoding="utf-8"), tree) for path, tree in modules.items())
    assert len(modules) <= MAX_FILES, f"{len(modules)} files"
    assert num_lines <= MAX_LINES, f"{num_lines} lines of code"
