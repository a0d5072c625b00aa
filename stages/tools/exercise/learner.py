"""`make check STAGE=2`: run the tests of the learner's step, and explain what is red or what was gained."""

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..chain.model import GAIN_TEST, ChainError, Stage, Step
from .folder import exercise_folder, experiments, how_to, open_functions, remember_step, step_of
from .functions import find
from .report import Report
from .run import environment, run_tests

STORY = ("--temperature", "0", "--max-tokens", "40", "The fox looked at the table")


class Result(NamedTuple):
    """The outcome of a group of tests. It has as many tests as chain.toml lists, whichever of them could run."""

    num_tests: int
    num_green: int
    red: list[Report]  # random histories last: other tests say more
    num_missing: int  # tests that did not run


def check_exercise(stage: Stage, number: int | None) -> bool:
    """Check the work in exercises/sN, and print the result. Return True if nothing is red.

    number: check only that step. Otherwise, check the steps from the first to the learner's, and the gain if every
    step has been worked on.
    """
    folder = exercise_folder(stage)
    if stage.steps and not folder.is_dir():
        raise ChainError(f"there is no exercises/{stage.key} yet: make exercise STAGE={stage.number} writes it")
    if fault := next(_not_python(folder), None):
        print(f"exercises/{stage.key}/{fault}\nThen again:  make check STAGE={stage.number}")
        return False
    steps = [step_of(stage, number)] if number else _steps_to_check(stage, folder)
    is_all = number is None and len(steps) == len(stage.required_steps)
    groups = [*(step.tests for step in steps), (GAIN_TEST,) if is_all else ()]
    reports = run_tests(folder, dict.fromkeys(test for group in groups for test in group))
    *results, gain = (_result(group, reports) for group in groups)
    if not _print_steps(stage, steps, results):
        return False
    print(textwrap.fill(f"What works now: {steps[-1].works}", 110))
    if gain.red:
        print("\nThe steps are green, but a test of the gain is red.")
        _print_red(stage, steps[-1], gain)
        return False
    if is_all:
        _print_gain(stage)
    _print_next(stage, steps[-1])
    return True


def _print_steps(stage: Stage, steps: list[Step], results: list[Result]) -> bool:
    """Print the result of each step, up to the first red one. Return True if none is red."""
    for step, result in zip(steps, results, strict=True):
        remember_step(stage, step.number)
        if result.red:
            _print_red(stage, step, result)
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
    """Return the steps before the first untouched one; the first step in any case."""
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


def _result(group: tuple[str, ...], reports: list[Report]) -> Result:
    mine = {test: [each for each in reports if each.is_about(test)] for test in group}
    red = [each for each in reports if each.is_red and any(each.is_about(test) for test in group)]
    red.sort(key=lambda each: "test_histories" in each.test)
    num_green = sum(bool(mine[test]) and not any(each.is_red for each in mine[test]) for test in group)
    num_missing = sum(all(each.outcome == "broken" for each in mine[test]) for test in group)
    return Result(len(group), num_green, red, num_missing)


def _print_gain(stage: Stage) -> None:
    """Print a story, what the stage itself tells if that is another one, and the figures of the gain test."""
    mine = f"exercises.{stage.key}"
    packages = [path.replace("/", ".") for path in (stage.path, (stage.before or stage).path)]
    print("\nA story from your code; every stage writes the same one:\n", flush=True)
    print(yours := _output(stage, "-m", mine, *STORY), flush=True)
    ours = _output(stage, "-m", packages[0], *STORY)
    if _told(yours) != _told(ours):
        print(f"The tests are green, and yet this is another story: a fault that no test sees. {stage.path} writes:\n")
        print(ours)
    print(_output(stage, str(Path(__file__).with_name("gain.py")), *packages, mine), end="")


def _output(stage: Stage, *arguments: str) -> str:
    """Return what a Python program prints. Its errors go to the terminal."""
    command, environs = [sys.executable, *arguments], environment(stage.root)
    done = subprocess.run(command, cwd=stage.root, env=environs, stdout=subprocess.PIPE, encoding="utf-8")
    if done.returncode:
        print(done.stdout)
        raise ChainError(f"python {' '.join(arguments)} failed: see above")
    return done.stdout


def _told(output: str) -> list[str]:
    r"""Return the lines of a story, without the last one, which has the speed.

    >>> _told("The fox ran.  [3 tokens, stop]\n\n41 tokens/s, first token 9 ms")
    ['The fox ran.  [3 tokens, stop]', '']
    """
    return [line for line in output.splitlines() if " tokens/s, " not in line]


def _print_next(stage: Stage, step: Step) -> None:
    if step != stage.required_steps[-1] and not stage.is_optional(step):
        next_step = step_of(stage, step.number + 1)
        remember_step(stage, next_step.number)
        print(f"\nNext: step {next_step.number}, about {next_step.minutes} minutes: {next_step.title}.")
        print(how_to(stage, next_step.number))
        return
    diff = f"make diff STAGE={stage.number}" if stage.before else f"diff -u exercises/{stage.key} {stage.path}"
    print(f"\nNext:  {diff}      compare with how this course wrote it")
    for optional in stage.steps[step.number :]:
        print(f"   or  make exercise STAGE={stage.number} STEP={optional.number}      {optional.title}")
    if stage.tries:
        print(f"Then try these on your copy:\n{experiments(stage)}")


def _print_red(stage: Stage, step: Step, result: Result) -> None:
    """Print the first red test, and how to go on."""
    missing = f", and {result.num_missing} did not run" if result.num_missing else ""
    print(f"Step {step.number} of {len(stage.steps)} is red: {step.title}.")
    print(f"{result.num_green} of {result.num_tests} tests are green{missing}. The first red one:\n")
    first = result.red[0].within([name.name for each in stage.steps for name in each.functions])
    print("\n".join(first.lines()) + "\n")
    print(how_to(stage, step.number, _function_of(stage, step, first)))


def _function_of(stage: Stage, step: Step, report: Report) -> str | None:
    """Return the function of this step in which the red test ended, if it is one."""
    name = report.code.name if report.code else ""
    return name if name in [each.name for each in step.functions] else None
