"""chain.toml, read into a Chain. Its schema is told in comments at the top of that file."""

import posixpath
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .model import KINDS, Chain, ChainError, Change, FunctionName, OptionalPart, Stage, Step, key_of


def load(root: Path) -> Chain:
    """Read stages/chain.toml of the repository at `root`. Raises ChainError where it does not follow its schema."""
    try:
        tables = tomllib.loads((root / "stages/chain.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ChainError(f"{root} has no stages/chain.toml") from None
    except tomllib.TOMLDecodeError as error:
        raise ChainError(f"chain.toml: {error}") from None
    names = _strings(tables.pop("stages", []), "stages")
    copy = tables.pop("copy", None)
    if not isinstance(copy, str | None):
        raise ChainError(f"chain.toml: copy must be a folder, not {copy!r}")
    return Chain(root, tuple(_stages(root, names, tables)), copy and _path(copy))


def _stages(root: Path, names: tuple[str, ...], tables: dict[str, Any]) -> Iterator[Stage]:
    keys = [key_of(posixpath.basename(name)) for name in names]
    for key in dict.fromkeys([*keys, *tables]):
        if (keys.count(key), key in tables) != (1, True):
            raise ChainError(f"chain.toml: each of the stages needs one table; [{key}] breaks that rule")
    before = None
    for key, name in zip(keys, names, strict=True):
        path = _path(name)
        if not (root / path).is_dir():
            raise ChainError(f"chain.toml: the folder of stage {name!r} is missing: {path}")
        before = _stage(root, path, before, tables[key], f"[{key}]")
        yield before


def _path(name: str) -> str:
    """A path relative to chain.toml as one relative to the root."""
    return posixpath.normpath(posixpath.join("stages", name))


def _stage(root: Path, path: str, before: Stage | None, table: dict[str, Any], where: str) -> Stage:
    if before is None:
        _require({"lesson": [], "tries": [], **table}, where, {"files": list, "lesson": list, "tries": list})
    else:
        wanted = {"files": list, "budget": int, "optional": dict, "steps": list}
        _require({"steps": [], "optional": {}, **table}, where, wanted)
    changes = [_change(entry, f"{where} files, entry {n}") for n, entry in enumerate(table["files"], 1)]
    steps = [_step(entry, n, f"{where} step {n}") for n, entry in enumerate(table.get("steps", []), 1)]
    optional = _optional(table["optional"], f"{where} optional") if "optional" in table else OptionalPart()
    lesson, tries = (_strings(table[key], f"{where} {key}") if key in table else () for key in ("lesson", "tries"))
    return Stage(root, path, before, tuple(changes), table.get("budget"), optional, tuple(steps), lesson, tries)


def _optional(table: dict[str, Any], where: str) -> OptionalPart:
    _require(table, where, {"files": list, "budget": int})
    return OptionalPart(_strings(table["files"], f"{where} files"), table["budget"])


def _change(table: dict[str, Any], where: str) -> Change:
    kinds = [kind for kind in KINDS if kind in table]
    if len(kinds) != 1:
        raise ChainError(f"chain.toml: {where} needs one of {', '.join(KINDS)}; it has {len(kinds)}")
    _require(table, where, {kinds[0]: str, "why": str})
    return Change(kinds[0], table[kinds[0]], table["why"])


def _step(table: dict[str, Any], number: int, where: str) -> Step:
    wanted = {"title": str, "functions": list, "tests": list, "works": str, "hints": list, "minutes": int}
    _require(table, where, wanted)
    functions = tuple(_function(text, where) for text in _strings(table["functions"], f"{where} functions"))
    tests = _strings(table["tests"], f"{where} tests")
    hints = _strings(table["hints"], f"{where} hints")
    if len(hints) != 2:
        raise ChainError(f"chain.toml: {where} needs two hints, a push and then the way; it has {len(hints)}")
    return Step(number, table["title"], functions, tests, table["works"], hints, table["minutes"])


def _function(text: str, where: str) -> FunctionName:
    file, _, name = text.partition(":")
    if not (file and name):
        raise ChainError(f"chain.toml: {where}: {text!r} is not of the form file.py:function or file.py:Class.method")
    return FunctionName(file, name)


def _require(table: Any, where: str, wanted: Mapping[str, type]) -> None:
    """Raises ChainError unless `table` has the wanted keys, of the wanted types, and no other."""
    if not isinstance(table, dict):
        raise ChainError(f"chain.toml: {where} must be a table")
    for key in [*wanted, *table]:
        if key not in table:
            raise ChainError(f"chain.toml: {where} lacks {key!r}")
        if key not in wanted:
            raise ChainError(f"chain.toml: {where} has the unknown key {key!r}")
        if not isinstance(table[key], wanted[key]):
            raise ChainError(f"chain.toml: {where}: {key!r} must be of type {wanted[key].__name__}")


def _strings(values: Any, where: str) -> tuple[str, ...]:
    if not (isinstance(values, list) and values and all(isinstance(value, str) for value in values)):
        raise ChainError(f"chain.toml: {where} must be a list of strings with at least one in it")
    return tuple(values)
