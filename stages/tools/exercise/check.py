"""`make check STAGE=2`: run the tests of the step that a learner is at, and say in words what is red or what is won."""

import ast
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..chain.model import GAIN_TEST, ChainError, Stage, Step
from .folder import exercise_folder, how_to, open_functions, remember_step, step_of
from .functions import find
from .red import say_red

FLAGS = ("-q", "--tb=short", "--rootdir=.", "--confcutdir=.", "-c", os.devnull, "-p", "no:cacheprovider")
SETTINGS = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
SETTINGS |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # a stage needs pytest alone
STORY = ("--temperature", "0", "--max-tokens", "40", "The fox looked at the table")

TOOLS = Path(__file__).resolve().parents[3]


class Result(NamedTuple):
    """How a group of tests ended."""

    num_green: int
    red: list[dict[str, Any]]  # as told.py tells them


def check_exercise(stage: Stage, number: int | None) -> bool:
    """Check the work in exercises/sN, and print what comes of it; True if nothing is red.

    number: check that step alone. Otherwise all from the first to the one that the learner is at; and the gain, if
    something is written for each.
    """
    folder = exercise_folder(stage)
    if stage.steps and not folder.is_dir():
        raise ChainError(f"there is no exercises/{stage.key} yet: make exercise STAGE={stage.number} writes it")
    if fault := next(_not_python(folder), None):
        print(f"exercises/{stage.key}/{fault}\nThen again:  make check STAGE={stage.number}")
        return False
    steps = [step_of(stage, number)] if number else _steps_to_check(stage, folder)
    is_all = number is None and len(steps) == len(stage.required_steps)
    *results, gain = _run(stage, folder, [*(step.tests for step in steps), (GAIN_TEST,) if is_all else ()])
    if not _are_green(stage, steps, results):
        return False
    print(textwrap.fill(f"What works now: {steps[-1].works}", 110))
    if gain.red:
        print("\nAnd yet nothing is won: a test of the gain is red.")
        say_red(stage, steps[-1], gain.num_green, gain.red)
        return False
    if is_all:
        _tell_gain(stage)
    _say_next(stage, steps[-1])
    return True


def _are_green(stage: Stage, steps: list[Step], results: list[Result]) -> bool:
    """Say so of each step, up to the first red one."""
    for step, result in zip(steps, results, strict=True):
        remember_step(stage, step.number)
        if result.red:
            say_red(stage, step, result.num_green, result.red)
            return False
        print(f"Step {step.number} of {len(stage.steps)} is green (tests: {result.num_green}): {step.title}.")
    return True


def _not_python(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*.py")):
        try:
            ast.parse(path.read_bytes())
        except SyntaxError as error:
            line = (error.text or "").strip()
            yield f"{path.relative_to(folder)}, line {error.lineno}, is not Python yet: {error.msg}\n\n    {line}\n"


def _steps_to_check(stage: Stage, folder: Path) -> list[Step]:
    """The steps up to the first for which nothing is written, without that one; the first step in any case."""
    opened = open_functions(stage, 1)
    steps = [stage.steps[0]]
    for step in stage.required_steps[1:]:
        if all(_body(opened[file], name) == _body(_text(folder / file), name) for file, name in step.functions):
            break
        steps.append(step)
    return steps


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _body(text: str, name: str) -> str | None:
    function = find(text, name)
    return function.body.strip() if function else None


def _run(stage: Stage, folder: Path, groups: list[tuple[str, ...]]) -> list[Result]:
    """Run groups of tests in one process; what each came to. Raises ChainError if they did not run."""
    tests = dict.fromkeys(test for group in groups for test in group)
    command = [sys.executable, "-m", "pytest", *FLAGS, "-p", "stages.tools.exercise.reporter", *tests]
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [*command, "--tell-to", str(write_end)],
            cwd=folder, env=_environment(TOOLS), pass_fds=[write_end], stdout=said, stderr=subprocess.STDOUT,
        )  # fmt: skip
        os.close(write_end)
        told = list(_as_they_come(read_end))
        status = process.wait()
        said.seek(0)
        if status not in (0, 1) and not told:
            raise ChainError(f"the tests could not be run: {_last_error(said.read())}")
    return [_result(group, told) for group in groups]


def _environment(root: Path) -> dict[str, str]:
    """That of a program which imports what is below `root`."""
    return os.environ | SETTINGS | {"PYTHONPATH": str(root)}


def _as_they_come(read_end: int) -> Iterator[dict[str, Any]]:
    """What the tests tell, with a count on a terminal."""
    count = 0
    with open(read_end, encoding="utf-8") as lines:
        for count, line in enumerate(lines, 1):
            if sys.stdout.isatty():
                print(f"\r  {count} tests have run", end="", flush=True)
            yield json.loads(line)
    if count and sys.stdout.isatty():
        print("\r" + " " * 40 + "\r", end="")


def _result(group: tuple[str, ...], told: list[dict[str, Any]]) -> Result:
    mine = [each for each in told if any(_is_of(each, test) for test in group)]
    red = [each for each in mine if each["outcome"] not in ("passed", "skipped")]
    num_green = len({each["test"] for each in mine} - {each["test"] for each in red})
    return Result(num_green, red)


def _is_of(told: dict[str, Any], test: str) -> bool:
    """Whether what is told is of `test`, a node id: of one of its parameters, or of the file that it is in."""
    if told["outcome"] == "broken":
        return test.startswith(told["test"])
    return told["test"] == test or told["test"].startswith((f"{test}[", f"{test}::"))


def _last_error(said: str) -> str:
    if "No module named pytest" in said:
        return f"{sys.executable} has no pytest. Without PY=, make takes .venv, which has it"
    lines = [line.removeprefix("E").strip() for line in said.splitlines() if line.startswith("E ") or "rror" in line]
    return lines[-1] if lines else "pytest said nothing"


def _tell_gain(stage: Stage) -> None:
    """A story, and the figures of the gain test."""
    assert stage.before, "the first stage has no exercise"
    mine = f"exercises.{stage.key}"
    print("\nA story, told by your code; every stage tells the same one:\n", flush=True)
    _show(stage, "-m", mine, *STORY)
    print("What you have won, counted on the same work:\n", flush=True)
    packages = [path.replace("/", ".") for path in (stage.path, stage.before.path)]
    _show(stage, str(Path(__file__).with_name("gain.py")), *packages, mine)


def _show(stage: Stage, *arguments: str) -> None:
    if subprocess.run([sys.executable, *arguments], cwd=stage.root, env=_environment(stage.root)).returncode:
        raise ChainError(f"python {' '.join(arguments)} ended with an error: see above")


def _say_next(stage: Stage, step: Step) -> None:
    if step != stage.required_steps[-1] and not stage.is_optional(step):
        next_step = step_of(stage, step.number + 1)
        remember_step(stage, next_step.number)
        print(f"\nNext: step {next_step.number}, about {next_step.minutes} minutes: {next_step.title}.")
        print(how_to(stage, next_step.number))
        return
    print(f"\nNext:  make diff STAGE={stage.number}      compare with how this course wrote it")
    for optional in stage.steps[step.number :]:
        print(f"   or  make exercise STAGE={stage.number} STEP={optional.number}      {optional.title}")
