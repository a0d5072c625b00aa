"""Find tests of a stage that duplicate an earlier stage's: byte for byte, they reach the same code.

A stage begins as a copy of the previous stage, with its tests. A test reaches the definitions that it names, its
fixtures, and everything that those name in turn, anywhere in the stage's folder:

    test_reuse      names BlockManager, make_sequence
    make_sequence   names Sequence                        (tests/helpers.py)
    BlockManager    names BlockPool, PoolReport, ...      (block_manager.py)

If any of them has changed, the test runs again. A name that means something else where it is used, such as a local
variable with the name of a fixture, can only cause an unnecessary run.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

OWN_PLACE = {
    "__file__",
    "__name__",
    "__package__",
}  # their values differ by folder


class Place(NamedTuple):
    """A top-level definition of a file, or the whole file if `name` is empty."""

    path: Path
    name: str


class Reached(NamedTuple):
    file: str  # relative to the stage's folder
    text: str


class Module:
    """A file's top-level statements, by the names that they bind."""

    def __init__(self, path: Path) -> None:
        self.path, text = path, path.read_text(encoding="utf-8")
        self._lines = text.splitlines()
        self.imports: dict[str, Place] = {}
        self.definitions: dict[str, list[ast.stmt]] = {}
        self.others: list[ast.stmt] = []  # they bind nothing, but run whenever anything in the file is used
        for statement in parse(text).body:
            self._file(statement)

    def _file(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            self.imports |= relative_imports(self.path, statement)
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self.definitions.setdefault(statement.name, []).append(statement)
        elif bound := [node.id for node in ast.walk(statement) if is_bound(node)]:
            for name in bound:
                self.definitions.setdefault(name, []).append(statement)
        elif not is_docstring(statement):
            self.imports |= relative_imports(self.path, statement)  # if TYPE_CHECKING: from .engine import LLMEngine
            self.others.append(statement)

    def statements(self, name: str) -> list[ast.stmt]:
        """Return the statements that bind `name`, or all of them, and those that run with them."""
        chosen = [self.definitions[name]] if name else self.definitions.values()
        return [*self.others, *(statement for statements in chosen for statement in statements)]

    def text_of(self, statement: ast.stmt) -> str:
        first = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", []))])
        return "\n".join(self._lines[first - 1 : statement.end_lineno])

    @cached_property
    def always_used(self) -> list[str]:
        """Return the fixtures and hooks of a conftest.py that every test uses."""
        return [
            name
            for name, statements in self.definitions.items()
            if name.startswith("pytest_") or any("autouse=True" in self.text_of(each) for each in statements)
        ]


@cache
def parse(text: str) -> ast.Module:
    """Return the tree of a file. Files with equal texts share it, and the caches below."""
    return ast.parse(text)


def is_bound(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class RelativeName(NamedTuple):
    """A relative import: `from ..module import name as bound`."""

    level: int
    module: str
    name: str
    bound: str


@cache
def relative_names(tree: ast.AST) -> list[RelativeName]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    return [
        RelativeName(node.level, node.module or "", alias.name, alias.asname or alias.name)
        for node in nodes
        for alias in node.names
    ]


def relative_imports(path: Path, tree: ast.AST) -> dict[str, Place]:
    """Return the names that relative imports in `tree`, code of the file `path`, bind, and their definitions."""
    places = {
        each.bound: place_of(path.parents[each.level - 1].joinpath(*each.module.split(".")), each.name)
        for each in relative_names(tree)
    }
    return {name: place for name, place in places.items() if place.path.exists()}


def place_of(module: Path, name: str) -> Place:
    """Return the place of `name` in `module`, a path without .py: a definition, or a file of a package."""
    if module.is_dir():
        submodule = (module / name).with_suffix(".py")
        return Place(submodule, "") if submodule.exists() else Place(module / "__init__.py", name)
    return Place(module.with_suffix(".py"), name)


@cache
def names_in(statement: ast.stmt) -> set[str]:
    """Return names, arguments (they may be fixtures) and quoted words (they may be either)."""
    names = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            names.add(node.value)
    return names


class Stage:
    """The folder of a stage, and the code that its tests reach."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._modules: dict[Path, Module] = {}
        self._next: dict[Place, tuple[frozenset[Reached], frozenset[Place]]] = {}

    def reached_by(self, path: Path, name: str) -> frozenset[Reached]:
        """Return the code in this folder that a test of the file `path` can reach. An empty name means all tests."""
        conftest = path.parent / "conftest.py"
        places = [Place(path, name)]
        if conftest.exists():
            places += [Place(conftest, fixture) for fixture in self._module(conftest).always_used]
        reached: set[Reached] = set()
        seen: set[Place] = set()
        while places:
            place = places.pop()
            if place not in seen:
                seen.add(place)
                texts, following = self._look(place)
                reached |= texts
                places += following
        return frozenset(reached)

    def _module(self, path: Path) -> Module:
        if path not in self._modules:
            self._modules[path] = Module(path)
        return self._modules[path]

    def _look(self, place: Place) -> tuple[frozenset[Reached], frozenset[Place]]:
        """Return the texts of one place, and the places that they name."""
        if place not in self._next:
            texts, places = set(), set()
            if place.name and place.name not in (module := self._module(place.path)).definitions:
                places.add(module.imports.get(place.name, Place(place.path, "")))  # __init__.py reexports it
            else:
                for statement in self._module(place.path).statements(place.name):
                    names = names_in(statement)
                    own = self.folder.name if names & OWN_PLACE else ""
                    text = self._module(place.path).text_of(statement)
                    texts.add(Reached(f"{place.path.relative_to(self.folder)}", own + text))
                    places |= {*self._places(place.path, names)}
                    places |= {*relative_imports(place.path, statement).values()}
            self._next[place] = frozenset(texts), frozenset(places)
        return self._next[place]

    def _places(self, path: Path, names: Iterable[str]) -> Iterator[Place]:
        """Yield the places in the folder that define these names for the file `path`."""
        module, conftest = self._module(path), path.parent / "conftest.py"
        for name in names:
            if name in module.definitions:
                yield Place(path, name)
            elif name in module.imports:
                yield module.imports[name]
            elif conftest.exists() and name in self._module(conftest).definitions:
                yield Place(conftest, name)


class Case(NamedTuple):
    path: Path
    name: str  # the top-level function or class, or "" for the examples of a file
    id: str  # the part of the node id after the path


def find_copies(tests: list[Case], folders: list[Path]) -> set[int]:
    """Return the indices of the tests that duplicate another one in `tests`, of an earlier stage in `folders`.

    A test outside all folders is never a copy.
    """
    stages = [Stage(folder) for folder in folders]
    seen: set[tuple[Path, str, frozenset[Reached]]] = set()
    copies = set()
    for stage in stages:
        reached: dict[tuple[Path, str], frozenset[Reached]] = {}
        inside = {path for path in {test.path for test in tests} if path.is_relative_to(stage.folder)}
        for i, test in enumerate(tests):
            if test.path in inside:
                place = test.path, test.name
                if place not in reached:
                    reached[place] = stage.reached_by(*place)
                id = test.id.replace(stage.folder.name, "")  # an example's id contains its module's name
                key = test.path.relative_to(stage.folder), id, reached[place]
                if key in seen:
                    copies.add(i)
                seen.add(key)
    return copies
