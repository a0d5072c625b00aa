"""chain.toml, read into a Chain. Comments at the top of that file describe its schema."""

import posixpath
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .model import (
    ALL_OTHERS,
    BRANCH,
    KINDS,
    Chain,
    ChainError,
    Change,
    FunctionName,
    OptionalPart,
    Package,
    Stage,
    Step,
    key_of,
)


def load(root: Path) -> Chain:
    """Read stages/chain.toml of the repository at `root`. Raise ChainError where it does not follow its schema."""
    try:
        tables = tomllib.loads((root / "stages/chain.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ChainError(f"{root} has no stages/chain.toml") from None
    except tomllib.TOMLDecodeError as error:
        raise ChainError(f"chain.toml: {error}") from None
    names = _strings(tables.pop("stages", []), "stages")
    branch_names = _strings(tables.pop("branches"), "branches") if "branches" in tables else ()
    package = tables.pop("package", None)
    keys = [key_of(posixpath.basename(name)) for name in (*names, *branch_names)]
    for key in dict.fromkeys([*keys, *tables]):
        if (keys.count(key), key in tables) != (1, True):
            raise ChainError(f"chain.toml: each stage needs one table, and each table one stage: check [{key}]")
    stages = tuple(_stages(root, names, tables))
    branches = tuple(_branch(root, name, stages, tables[name]) for name in branch_names)
    return Chain(root, stages, branches, None if package is None else _package(stages[-1], package))


def _stages(root: Path, names: tuple[str, ...], tables: dict[str, Any]) -> Iterator[Stage]:
    before = None
    for name in names:
        key = key_of(posixpath.basename(name))
        before = _stage(root, _folder(root, name, f"of stage {name!r}"), before, tables[key], f"[{key}]")
        yield before


def _branch(root: Path, name: str, stages: tuple[Stage, ...], table: dict[str, Any]) -> Stage:
    """Return a branch. Its base is the stage that its table calls `after`."""
    if not name.startswith(BRANCH):
        raise ChainError(f"chain.toml: the name of a branch begins with {BRANCH}, and {name!r} does not")
    after = table.pop("after", None)
    bases = [stage for stage in stages if stage.key == after]
    if not bases:
        raise ChainError(f"chain.toml: [{name}] after must be one of {', '.join(s.key for s in stages)}, got {after!r}")
    return _stage(root, _folder(root, name, f"of branch {name!r}"), bases[0], table, f"[{name}]")


def _folder(root: Path, name: str, what: str) -> str:
    """Return a folder named relative to chain.toml as one relative to the root."""
    path = posixpath.normpath(posixpath.join("stages", name))
    if not (root / path).is_dir():
        raise ChainError(f"chain.toml: the folder {what} is missing: {path}")
    return path


def _stage(root: Path, path: str, before: Stage | None, table: dict[str, Any], where: str) -> Stage:
    own: dict[str, Any] = {"lesson": []} if before is None else {"optional": {}}
    defaults: dict[str, Any] = {"steps": [], **own}
    if before is None or posixpath.basename(path).startswith(BRANCH):
        defaults["tries"] = []
    required: dict[str, type] = {"files": list, **{key: type(value) for key, value in defaults.items()}}
    if before or "budget" in table:
        required["budget"] = int
    _require(defaults | table, where, required)
    changes = [_change(entry, f"{where} files, entry {n}", KINDS) for n, entry in enumerate(table["files"], 1)]
    steps = [_step(entry, n, f"{where} step {n}") for n, entry in enumerate(table.get("steps", []), 1)]
    optional = _optional(table["optional"], f"{where} optional") if "optional" in table else OptionalPart()
    lesson, tries = (_strings(table[key], f"{where} {key}") if key in table else () for key in ("lesson", "tries"))
    return Stage(root, path, before, tuple(changes), table.get("budget"), optional, tuple(steps), lesson, tries)


def _package(last: Stage, table: dict[str, Any]) -> Package:
    _require(table, "[package]", {"folder": str, "paths": dict, "files": list})
    paths = {key: _places(key, value, f"[package.paths] {key!r}") for key, value in table["paths"].items()}
    kinds = tuple(kind for kind in KINDS if kind != "new")  # new files of the package are not declared
    changes = [_change(entry, f"[package] files, entry {n}", kinds) for n, entry in enumerate(table["files"], 1)]
    return Package(last.root, _folder(last.root, table["folder"], "of the package"), last, tuple(changes), paths)


def _places(key: str, value: Any, where: str) -> tuple[str, ...]:
    """Return where the package keeps a file, or in which folder it keeps a folder's files."""
    is_folder = key == ALL_OTHERS or key.endswith("/")
    places = _strings(value if isinstance(value, list) else [value], where)
    if is_folder and not (len(places) == 1 and places[0].endswith("/")):
        raise ChainError(f"chain.toml: {where} must be one folder, ending in a slash")
    if not is_folder and any(place.endswith("/") for place in places):
        raise ChainError(f"chain.toml: {where} must be a file or a list of files")
    return places


def _optional(table: dict[str, Any], where: str) -> OptionalPart:
    _require(table, where, {"files": list, "budget": int})
    return OptionalPart(_strings(table["files"], f"{where} files"), table["budget"])


def _change(table: dict[str, Any], where: str, known: tuple[str, ...]) -> Change:
    kinds = [kind for kind in known if kind in table]
    if len(kinds) != 1:
        raise ChainError(f"chain.toml: {where} needs one of {', '.join(known)}; it has {len(kinds)}")
    _require(table, where, {kinds[0]: str, "why": str})
    if not table["why"].strip():
        raise ChainError(f"chain.toml: {where} has an empty why")
    return Change(kinds[0], table[kinds[0]], table["why"])


def _step(table: dict[str, Any], number: int, where: str) -> Step:
    required = {"title": str, "functions": list, "tests": list, "works": str, "hints": list, "minutes": int}
    _require(table, where, required)
    functions = tuple(_function(text, where) for text in _strings(table["functions"], f"{where} functions"))
    tests = _strings(table["tests"], f"{where} tests")
    hints = _strings(table["hints"], f"{where} hints")
    if len(hints) != 2:
        raise ChainError(f"chain.toml: {where} needs two hints, a nudge and the approach; it has {len(hints)}")
    return Step(number, table["title"], functions, tests, table["works"], (hints[0], hints[1]), table["minutes"])


def _function(text: str, where: str) -> FunctionName:
    file, _, name = text.partition(":")
    if not (file and name):
        raise ChainError(f"chain.toml: {where}: {text!r} is not of the form file.py:function or file.py:Class.method")
    return FunctionName(file, name)


def _require(table: Any, where: str, required: Mapping[str, type]) -> None:
    """Raise ChainError unless `table` has exactly the required keys, with values of the required types."""
    if not isinstance(table, dict):
        raise ChainError(f"chain.toml: {where} must be a table")
    for key in [*required, *table]:
        if key not in table:
            raise ChainError(f"chain.toml: {where} needs {key!r}")
        if key not in required:
            raise ChainError(f"chain.toml: {where} has the unknown key {key!r}")
        if not isinstance(table[key], required[key]):
            raise ChainError(f"chain.toml: {where}: {key!r} must be of type {required[key].__name__}")


def _strings(values: Any, where: str) -> tuple[str, ...]:
    if not (isinstance(values, list) and values and all(isinstance(value, str) for value in values)):
        raise ChainError(f"chain.toml: {where} must be a non-empty list of strings")
    return tuple(values)
