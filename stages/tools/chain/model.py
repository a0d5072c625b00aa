"""The chain: stages in order, branches, and the package at its end; what each one changes, and its exercise."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

KINDS = ("new", "changed", "removed")
GAIN_TEST = "tests/test_gain.py"
GAIN_FIGURES = "tests/gain.py"  # counts what the gain test compares, in this stage and in the previous one
ALL_OTHERS = "*"  # in a package's paths: every file that no other entry places
BRANCH = "more_"  # how the name of a branch begins


class ChainError(ValueError):
    """An error that the person at the keyboard can fix, described in one line."""


class Change(NamedTuple):
    """One file that a link adds, changes or removes."""

    kind: str  # one of KINDS
    file: str  # relative to the stage or package; a removed file has its name in the previous stage
    why: str


class FunctionName(NamedTuple):
    """A function of a stage, written "file.py:function" or "file.py:Class.method"."""

    file: str
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.name}"


class Step(NamedTuple):
    """One step of an exercise: functions to write, and the tests that they turn green."""

    number: int  # counts from 1
    title: str
    functions: tuple[FunctionName, ...]
    tests: tuple[str, ...]  # pytest node ids relative to the stage
    works: str  # what the learner has when the tests are green
    hints: tuple[str, str]  # a nudge, then the approach
    minutes: int


class OptionalPart(NamedTuple):
    """Files of a link that a reader may skip. Their lines are counted separately."""

    files: tuple[str, ...] = ()
    budget: int = 0  # of added lines of code


@dataclass(frozen=True)
class Link:
    """A folder of code, and what it changes in the previous stage."""

    root: Path  # of the repository
    path: str  # relative to root: "stages/s2_block_manager"
    before: Stage | None
    changes: tuple[Change, ...]  # in reading order

    @property
    def name(self) -> str:
        return posixpath.basename(self.path)

    @property
    def key(self) -> str:
        return key_of(self.name)

    @property
    def number(self) -> str:
        """The name that a person types: 2 for s2_block_manager, as in STAGE=2."""
        return self.key

    @property
    def folder(self) -> Path:
        return self.root / self.path

    def files(self) -> set[str]:
        """Return every file in the folder, relative to it."""
        return files_under(self.folder)

    def content(self, file: str) -> bytes | None:
        """Return a file's bytes, or None if it does not exist."""
        path = self.folder / file
        return path.read_bytes() if path.is_file() else None

    def text(self, file: str) -> str:
        """Return a file's text, or an empty string if it does not exist."""
        return (self.content(file) or b"").decode(encoding="utf-8", errors="replace")

    def old_name(self, change: Change) -> str:
        """Return the name that a changed file has in the previous stage."""
        return change.file


@dataclass(frozen=True)
class Stage(Link):
    """A stage and its link to the previous one, or a branch and its link to its base. All files of stage 1 are new."""

    budget: int | None  # of added lines of code, without the optional files
    optional: OptionalPart
    steps: tuple[Step, ...]
    lesson: tuple[str, ...] = ()  # of the first stage: the files to read first
    tries: tuple[str, ...] = ()  # of the first stage, and of a branch without steps: experiments

    @property
    def number(self) -> str:
        return self.key if self.is_branch else self.key.removeprefix("s")

    @property
    def is_branch(self) -> bool:
        return self.name.startswith(BRANCH)

    @property
    def required_steps(self) -> tuple[Step, ...]:
        """All steps but those that write optional files only, which come last."""
        return tuple(step for step in self.steps if not self.is_optional(step))

    def is_optional(self, step: Step) -> bool:
        return all(name.file in self.optional.files for name in step.functions)

    @property
    def minutes(self) -> int:
        """The minutes that the exercise takes, without its optional steps."""
        return sum(step.minutes for step in self.required_steps)


@dataclass(frozen=True)
class Package(Link):
    """The finished package, in which every code file of the last stage has a place."""

    before: Stage  # the last one
    paths: Mapping[str, tuple[str, ...]]  # a file or folder/ of the last stage -> its place or places in the package

    def places(self, file: str) -> tuple[str, ...]:
        """Return where the package keeps a file of the last stage; several places if it is split."""
        if file in self.paths:
            return self.paths[file]
        folders = [key for key in self.paths if key.endswith("/") and file.startswith(key)]
        if folders:
            (place,) = self.paths[longest := max(folders, key=len)]
            return (place + file.removeprefix(longest),)
        return tuple(place + file for place in self.paths.get(ALL_OTHERS, ()))

    def origins(self) -> dict[str, str]:
        """Return, for each file that the package takes from the last stage, its name there."""
        files = sorted(file for file in self.before.files() if not is_free(file))
        return {place: file for file in files for place in self.places(file)}

    def old_name(self, change: Change) -> str:
        return self.origins().get(change.file, change.file)


class Chain(NamedTuple):
    """The stages of a repository in order, their branches, and the package that they lead to, if it is declared."""

    root: Path
    stages: tuple[Stage, ...]
    branches: tuple[Stage, ...]
    package: Package | None

    @property
    def lessons(self) -> tuple[Stage, ...]:
        """The stages, then the branches: everything with a lesson."""
        return (*self.stages, *self.branches)

    @property
    def links(self) -> tuple[Link, ...]:
        """The lessons and the package. Each one comes after what it is based on."""
        return (*self.lessons, self.package) if self.package else self.lessons

    def based_on(self, start: Stage) -> list[Link]:
        """Return the links that an edit of `start` flows into, in an order in which it can be carried."""
        reached: list[Link] = [start]
        for link in self.links:
            if link.before in reached:
                reached.append(link)
        return reached[1:]

    def stage(self, name: str) -> Stage:
        """Return the stage called `name`: "2", "s2" or "s2_block_manager"; or the branch "more_kernel".

        Raise ChainError if there is none.
        """
        for stage in self.lessons:
            if name in (stage.name, stage.key, stage.number, stage.path):
                return stage
        known = ", ".join(stage.key for stage in self.lessons)
        raise ChainError(f"there is no stage {name!r}; there are: {known}")

    def link(self, name: str) -> Link:
        """Return the stage called `name`, or the package. Raise ChainError if there is neither."""
        if self.package and name in (self.package.name, self.package.path):
            return self.package
        return self.stage(name)


def key_of(name: str) -> str:
    """Return a stage's short name. A branch has none.

    >>> key_of("s2_block_manager"), key_of("s2"), key_of("more_kernel")
    ('s2', 's2', 'more_kernel')
    """
    return name if name.startswith(BRANCH) else name.partition("_")[0]


def is_free(file: str) -> bool:
    """Return True for files that each stage writes from scratch: its `__init__.py`, prose and tests.

    >>> [is_free(file) for file in ("__init__.py", "DIFF.md", "tests/test_gain.py", "llama/__init__.py")]
    [True, True, True, False]
    """
    return file in ("__init__.py", "README.md", "DIFF.md") or file.startswith("tests/")


def files_under(folder: Path) -> set[str]:
    """Return the files below `folder`, relative to it, without caches and hidden files."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {file.as_posix() for file in files if not any(part.startswith((".", "__pycache__")) for part in file.parts)}
