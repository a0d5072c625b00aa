"""Which tests of a stage are copies: all that they reach is, byte for byte, what an earlier stage's test reaches.

A stage begins as a copy of the one before, tests and all. A test reaches the definitions that it names, the fixtures
that it asks for, and what those name in turn, wherever in the stage's folder they are:

    test_reuse      names BlockManager, make_sequence
    make_sequence   names Sequence                        (tests/helpers.py)
    BlockManager    names BlockPool, PoolReport, ...      (block_manager.py)

If one of them has changed, the test runs again. A name that means something else in its place, say a local variable
called as a fixture is, makes a test run that need not; never the other way round.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

OWN_PLACE = {"__file__", "__name__", "__package__"}  # what names one of these may differ between equal texts


class Place(NamedTuple):
    """A definition at the top of a file, or, if `name` is empty, all of the file."""

    path: Path
    name: str


class Reached(NamedTuple):
    file: str  # relative to the stage's folder
    text: str


class Module:
    """A file as its top-level statements, by the names that they bind."""

    def __init__(self, path: Path) -> None:
        self.path, text = path, path.read_text(encoding="utf-8")
        self._lines = text.splitlines()
        self.imports: dict[str, Place] = {}
        self.definitions: dict[str, list[ast.stmt]] = {}
        self.others: list[ast.stmt] = []  # they bind nothing, and run with whatever is taken from the file
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
        """What binds `name`, or all statements, and what runs with them."""
        chosen = [self.definitions[name]] if name else self.definitions.values()
        return [*self.others, *(statement for statements in chosen for statement in statements)]

    def text_of(self, statement: ast.stmt) -> str:
        first = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", []))])
        return "\n".join(self._lines[first - 1 : statement.end_lineno])

    @cached_property
    def always_used(self) -> list[str]:
        """In a conftest.py, the fixtures and hooks that no test asks for."""
        return [
            name
            for name, statements in self.definitions.items()
            if name.startswith("pytest_") or any("autouse=True" in self.text_of(each) for each in statements)
        ]


@cache
def parse(text: str) -> ast.Module:
    """The tree of a file; files with one text share it, and what is found out about it."""
    return ast.parse(text)


def is_bound(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class RelativeName(NamedTuple):
    """`from ..module import name as bound`"""

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
    """What the relative imports anywhere in `tree`, code of the file `path`, bind, and where that is defined."""
    places = {
        each.bound: place_of(path.parents[each.level - 1].joinpath(*each.module.split(".")), each.name)
        for each in relative_names(tree)
    }
    return {name: place for name, place in places.items() if place.path.exists()}


def place_of(module: Path, name: str) -> Place:
    """`name` in `module`, a path without .py: a definition of a file or of a package, or a file of a package."""
    if module.is_dir():
        submodule = (module / name).with_suffix(".py")
        return Place(submodule, "") if submodule.exists() else Place(module / "__init__.py", name)
    return Place(module.with_suffix(".py"), name)


@cache
def names_in(statement: ast.stmt) -> set[str]:
    """Names, arguments, which may be fixtures, and words in quotes, which may be either."""
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
    """The folder of a stage, and what its tests reach."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._modules: dict[Path, Module] = {}
        self._next: dict[Place, tuple[frozenset[Reached], frozenset[Place]]] = {}

    def reached_by(self, path: Path, name: str) -> frozenset[Reached]:
        """All that the test `name` in the file `path` can reach in this folder; without a name, all of its tests."""
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
        """The texts of one place, and the places that they name."""
        if place not in self._next:
            texts, places = set(), set()
            if place.name and place.name not in (module := self._module(place.path)).definitions:
                places.add(module.imports.get(place.name, Place(place.path, "")))  # handed on by __init__.py
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
        """Where in the folder each of the names that code in the file `path` uses is defined."""
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
    name: str  # of the function or class at the top of its file; empty for a file's examples
    id: str  # what follows the path in its node id


def find_copies(tests: list[Case], folders: list[Path]) -> set[int]:
    """Indices of the tests that are copies of another one in `tests`, of an earlier one of the stages' `folders`.

    A test outside of all folders is no copy.
    """
    stages = [Stage(folder) for folder in folders]
    seen: set[tuple[Path, str, frozenset[Reached]]] = set()
    copies = set()
    for stage in stages:
        reached: dict[tuple[Path, str], frozenset[Reached]] = {}
        for i, test in enumerate(tests):
            if test.path.is_relative_to(stage.folder):
                which = test.path, test.name
                if which not in reached:
                    reached[which] = stage.reached_by(*which)
                id = test.id.replace(stage.folder.name, "")  # an example is named by its module
                key = test.path.relative_to(stage.folder), id, reached[which]
                if key in seen:
                    copies.add(i)
                seen.add(key)
    return copies
