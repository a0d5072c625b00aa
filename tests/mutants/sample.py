"""Which mutants are tested, and by which tests: targets.toml, stages/chain.toml and equivalents.toml, read."""

import tomllib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from stages.tools.chain.load import load
from tests.mutants.mutations import Mutant, Source

HERE = Path(__file__).parent
SLICE = 600  # mutants of one night, about an hour on two cores


class Target(NamedTuple):
    """A file to mutate, and its test files."""

    file: str
    tests: tuple[str, ...]
    always: tuple[str, ...] = ()  # test files that reach the file in another process
    before: str | None = None  # the same file of the stage before


class Equivalent(NamedTuple):
    """A mutant that behaves as the original does, as far as anyone can see."""

    id: str
    file: str
    function: str
    line: str
    change: str
    reason: str


def settings() -> dict[str, Any]:
    return tomllib.loads((HERE / "targets.toml").read_text(encoding="utf-8"))


def read_equivalents() -> list[Equivalent]:
    table = tomllib.loads((HERE / "equivalents.toml").read_text(encoding="utf-8"))
    return [Equivalent(**each) for each in table.get("equivalent", ())]


def expand(root: Path, patterns: list[str]) -> tuple[str, ...]:
    """Return the files of some patterns, in order. Raise ValueError if a pattern matches none."""
    files: dict[str, None] = {}
    for pattern in patterns:
        matches = sorted(path.relative_to(root).as_posix() for path in root.glob(pattern))
        if not matches:
            raise ValueError(f"targets.toml: {pattern} matches no file")
        files |= dict.fromkeys(matches)
    return tuple(files)


def read_targets(root: Path) -> list[Target]:
    """Return each file to mutate, with its tests."""
    targets = []
    for table in tomllib.loads((HERE / "targets.toml").read_text(encoding="utf-8"))["targets"]:
        if "stages" in table:
            targets += stage_targets(root, table["stages"], table["tests"], table["without"])
            continue
        tests, always = expand(root, table["tests"]), expand(root, table.get("always", []))
        targets += [Target(file, tests, always) for file in expand(root, table["files"])]
    return targets


def stage_targets(root: Path, keys: list[str], patterns: list[str], without: list[str]) -> Iterator[Target]:
    """Yield the files that each stage adds or changes. The model's are never among them."""
    for stage in load(root).lessons:
        if stage.key not in keys or stage.before is None:
            continue
        folder, before = Path(stage.path), Path(stage.before.path)
        matches = expand(root, [pattern.format(stage=folder.name) for pattern in patterns])
        tests = tuple(file for file in matches if Path(file).name not in without)
        for change in stage.changes:
            if change.kind != "removed" and change.file.endswith(".py") and change.file != "__main__.py":
                earlier = before / change.file
                known = earlier.as_posix() if (root / earlier).exists() else None
                yield Target((folder / change.file).as_posix(), tests, before=known)


def all_mutants(root: Path, targets: list[Target]) -> list[Mutant]:
    """Return the mutants of all targets, without those in functions that a stage takes over unchanged."""
    mutants, moved = [], settings()["moved"]
    for target in targets:
        text = (root / target.file).read_text(encoding="utf-8")
        source = Source(target.file, text, moved.get(target.file, ""))
        unchanged: frozenset[str] = frozenset()
        if target.before:
            earlier = Source(target.before, (root / target.before).read_text(encoding="utf-8")).functions
            unchanged = frozenset(name for name, text in source.functions.items() if earlier.get(name) == text)
        mutants += source.mutants(unchanged)
    return mutants


def ranked(mutants: list[Mutant], seed: int) -> list[Mutant]:
    """Return the mutants in an order that depends on each one's id alone."""
    return sorted(mutants, key=lambda mutant: mutant.rank(seed))


def slice_of(day: date, num_mutants: int, sample: int) -> range:
    """Return which of the ranked mutants a night tests: a slice after the sample, another one the next night.

    >>> slice_of(date(2026, 11, 28), 2000, 400), slice_of(date(2026, 11, 29), 2000, 400)
    (range(1000, 1600), range(1600, 2000))
    """
    num_slices = max(1, -(-(num_mutants - sample) // SLICE))
    start = sample + day.toordinal() % num_slices * SLICE
    return range(start, min(start + SLICE, num_mutants))
