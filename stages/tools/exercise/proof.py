"""The proof of an exercise: its tests are red before each step and green after it, and the gain is red at the start."""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..chain.model import GAIN_FIGURES, GAIN_TEST, ChainError, FunctionName, Stage, Step
from .folder import copy_stage, open_functions
from .functions import find

SECONDS = 300  # for one run of the tests; an opened function may loop forever
FLAGS = ("-q", "--rootdir=.", "-p", "no:cacheprovider", "--color=no", "--tb=no", "--show-capture=no", "-rpfE")
SETTINGS = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",  # several runs share the cores
    "PYTEST_ADDOPTS": "",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # a stage needs no plugin
}
ALWAYS_GIVEN = ("__init__", "check_integrity")  # an exercise opens neither


def declared_faults(stage: Stage) -> Iterator[str]:
    """Yield each mistake in the steps that chain.toml declares, such as a function that does not exist."""
    if (stage.before or stage.steps) and not 3 <= len(stage.steps) <= 5:
        yield f"{stage.path}: its exercise has {len(stage.steps)} steps, and should have 3 to 5"
    for file in (GAIN_TEST, GAIN_FIGURES) if stage.steps else ():
        if not stage.text(file):
            yield f"{stage.path}/{file} is missing"
    for step in stage.steps:
        for name in step.functions:
            if fault := _fault_of_function(stage, name):
                yield f"{stage.path}, step {step.number}: {name} {fault}"
        yield from _missing_tests(stage, step)


def _fault_of_function(stage: Stage, name: FunctionName) -> str:
    assert stage.before, "the first stage has no steps"
    if name.name.rpartition(".")[2] in ALWAYS_GIVEN:
        return "is always given: choose another function"
    try:
        now, before = (find(side.text(name.file), name.name) for side in (stage, stage.before))
    except ChainError as error:
        return f"cannot be opened: {error}"
    if now is None:
        return "does not exist"
    if before and before.body.strip() == now.body.strip():
        return "is the same as in the previous stage: there is nothing to write"
    return ""


def _missing_tests(stage: Stage, step: Step) -> Iterator[str]:
    for test in step.tests:
        file, _, name = test.partition("[")[0].partition("::")
        try:
            exists = stage.text(file) and (not name or find(stage.text(file), name.replace("::", ".")))
        except ChainError as error:
            yield f"{stage.path}/{file}: {error}"
            continue
        if not exists:
            yield f"{stage.path}, step {step.number}: there is no test {test}"


def proof_faults(stage: Stage, finished: bool = True) -> list[str]:
    """Run the exercise's tests before each step and after the last. Return a fault for each with the wrong color.

    finished: also run them with all steps solved. That is the stage itself, so its own tests prove the same.
    """
    if not stage.steps:
        return []
    if importlib.util.find_spec("pytest") is None:
        raise ChainError("the proof of an exercise runs pytest, and this Python has none: make setup")
    states = range(len(stage.steps) + finished)
    opened = [open_functions(stage, solved + 1) for solved in states]  # not in the threads: ast.parse may fail there
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        results = pool.map(lambda solved: list(_state(stage, solved, opened[solved])), states)
        return [fault for faults in results for fault in faults]


def _state(stage: Stage, solved: int, opened: dict[str, str]) -> Iterator[str]:
    """Yield the faults of the exercise with its first `solved` steps solved; `opened` are the texts of its files."""
    green = [test for step in stage.steps[:solved] for test in step.tests]
    red = [test for step in stage.steps[solved : solved + 1] for test in step.tests]
    if solved == 0:
        red.append(GAIN_TEST)
    if solved == len(stage.steps):
        green.append(GAIN_TEST)
    try:
        report = _run(stage, opened, [*green, *red])
    except ChainError as error:
        yield f"{stage.path} with {solved} steps solved: {error}"
        return
    for test in dict.fromkeys([*green, *red]):
        outcomes = set(re.findall(rf"^(PASSED|FAILED|ERROR) {re.escape(test)}(?=[\[: ]|$)", report, re.MULTILINE))
        is_red = bool(outcomes & {"FAILED", "ERROR"})
        if test in green and (is_red or not outcomes):
            yield f"{stage.path}: {test} is not green with {solved} steps solved"
        if test in red and not is_red:
            yield f"{stage.path}: {test} is not red with {solved} steps solved"


def _run(stage: Stage, opened: dict[str, str], tests: list[str]) -> str:
    """Return pytest's report on a copy of the stage. Raise ChainError if the tests did not run to their end."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / stage.name
        copy_stage(stage, folder, opened)
        command = [sys.executable, "-m", "pytest", *FLAGS, *dict.fromkeys(tests)]
        environment = os.environ | SETTINGS
        try:
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise ChainError(f"the tests did not end in {SECONDS} seconds") from None
    if done.returncode not in (0, 1):
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "rror" in line] or ["no report"]
        raise ChainError(f"pytest could not run them: {lines[0]}")
    return done.stdout
