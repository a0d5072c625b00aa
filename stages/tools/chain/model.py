"""The chain: stages in order, what each one changes, and the steps of its exercise."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

KINDS = ("new", "changed", "removed")
GAIN_TEST = "tests/test_gain.py"
GAIN_FIGURES = "tests/gain.py"  # the figures of the gain test, of this stage and of the one before


class ChainError(ValueError):
    """Something that the person at the keyboard can put right, said in one line."""


class Change(NamedTuple):
    """One file that a stage adds, changes or removes."""

    kind: str  # one of KINDS
    file: str  # relative to the stage
    why: str


class FunctionName(NamedTuple):
    """A function of a stage, written "file.py:function" or "file.py:Class.method"."""

    file: str
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.name}"


class Step(NamedTuple):
    """One step of an exercise: the functions to write and the tests that they turn green."""

    number: int  # counts from 1
    title: str
    functions: tuple[FunctionName, ...]
    tests: tuple[str, ...]  # pytest node ids relative to the stage
    works: str  # what a learner has when the tests are green
    hints: tuple[str, str]  # a push, and then the way
    minutes: int


class OptionalPart(NamedTuple):
    """What a reader of a link may leave out: files of their own, which are counted apart."""

    files: tuple[str, ...] = ()
    budget: int = 0  # of added lines of code


@dataclass(frozen=True)
class Stage:
    """One stage and its link to the stage before. All files of the first stage are new."""

    root: Path  # of the repository
    path: str  # relative to root: "stages/s2_block_manager"
    before: Stage | None
    changes: tuple[Change, ...]  # in reading order
    budget: int | None  # of added lines of code, without the optional files
    optional: OptionalPart
    steps: tuple[Step, ...]
    lesson: tuple[str, ...] = ()  # of the first stage: the files to read first
    tries: tuple[str, ...] = ()  # of a stage without steps: what there is to try

    @property
    def required_steps(self) -> tuple[Step, ...]:
        """The steps without those that write optional files only: these come last."""
        return tuple(step for step in self.steps if not self.is_optional(step))

    def is_optional(self, step: Step) -> bool:
        return all(name.file in self.optional.files for name in step.functions)

    @property
    def minutes(self) -> int:
        """How long the exercise takes, without its optional steps."""
        return sum(step.minutes for step in self.required_steps)

    @property
    def name(self) -> str:
        return posixpath.basename(self.path)

    @property
    def key(self) -> str:
        return key_of(self.name)

    @property
    def number(self) -> str:
        """What a person types for it: STAGE=2."""
        return self.key.removeprefix("s")

    @property
    def folder(self) -> Path:
        return self.root / self.path

    def files(self) -> set[str]:
        """Every file of the stage, relative to it."""
        return files_under(self.folder)

    def text(self, file: str) -> str:
        """A file's text; empty if there is no such file."""
        path = self.folder / file
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


class Chain(NamedTuple):
    """The stages of a repository, in order, and the folder that holds the code of the last one again."""

    root: Path
    stages: tuple[Stage, ...]
    copy: str | None  # relative to root

    def stage(self, name: str) -> Stage:
        """The stage called `name`: "2", "s2" or "s2_block_manager"."""
        for stage in self.stages:
            if name in (stage.name, stage.key, stage.number, stage.path):
                return stage
        known = ", ".join(stage.key for stage in self.stages)
        raise ChainError(f"there is no stage {name!r}; there are: {known}")


def key_of(name: str) -> str:
    """A stage's short name.

    >>> key_of("s2_block_manager"), key_of("s2")
    ('s2', 's2')
    """
    return name.partition("_")[0]


def is_free(file: str) -> bool:
    """True for what each stage writes anew and chain.toml does not list: the face, the prose and the tests.

    >>> [is_free(file) for file in ("__init__.py", "DIFF.md", "tests/test_gain.py", "llama/__init__.py")]
    [True, True, True, False]
    """
    return file in ("__init__.py", "README.md", "DIFF.md") or file.startswith("tests/")


def files_under(folder: Path) -> set[str]:
    """The files below `folder`, relative to it, without caches and hidden files."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {file.as_posix() for file in files if not any(part.startswith((".", "__pycache__")) for part in file.parts)}
