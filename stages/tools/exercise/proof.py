"""The proof of an exercise: its tests are red before each step and green after it, and the gain is red at the start."""

from collections.abc import Iterator

from ..chain.model import GAIN_FIGURES, GAIN_TEST, ChainError, FunctionName, Stage, Step
from .folder import open_functions
from .functions import find
from .report import Report
from .run import Version, run_versions

ALWAYS_GIVEN = ("__init__", "check_integrity")  # an exercise opens neither


def declared_faults(stage: Stage) -> Iterator[str]:
    """Yield each mistake in the steps that chain.toml declares, such as a function that does not exist."""
    if stage.before and stage.tries:
        if stage.steps:
            yield f"{stage.path} has tries and steps: it needs one of them"
    elif (stage.before or stage.steps) and not 3 <= len(stage.steps) <= 5:
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
    if name.name.rpartition(".")[2] in ALWAYS_GIVEN:
        return "is always given: choose another function"
    try:
        now = find(stage.text(name.file), name.name)
        before = find(stage.before.text(name.file), name.name) if stage.before else None
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
    versions = [
        Version(f"solved_{solved}", open_functions(stage, solved + 1), (*green, *red))
        for solved in range(len(stage.steps) + finished)
        for green, red in [_colors(stage, solved)]
    ]
    reports = run_versions(stage, versions)
    return [f for solved, version in enumerate(versions) for f in _faults(stage, solved, reports[version.name])]


def _colors(stage: Stage, solved: int) -> tuple[list[str], list[str]]:
    """Return the tests that are green, and those that are red, when the first `solved` steps are solved."""
    green = [test for step in stage.steps[:solved] for test in step.tests]
    red = [test for step in stage.steps[solved : solved + 1] for test in step.tests]
    if solved == 0:
        red.append(GAIN_TEST)
    if solved == len(stage.steps):
        green.append(GAIN_TEST)
    return green, red


def _faults(stage: Stage, solved: int, reports: list[Report]) -> Iterator[str]:
    """Yield the faults of the exercise with its first `solved` steps solved."""
    if broken := [report for report in reports if report.outcome == "broken"]:
        yield f"{stage.path} with {solved} steps solved: {broken[0].test} cannot be imported: {broken[0].result[0]}"
        return
    green, red = _colors(stage, solved)
    for test in dict.fromkeys([*green, *red]):
        mine = [report for report in reports if report.is_about(test)]
        is_red = any(report.is_red for report in mine)
        if test in green and (is_red or not mine):
            yield f"{stage.path}: {test} is not green with {solved} steps solved"
        if test in red and not is_red:
            yield f"{stage.path}: {test} is not red with {solved} steps solved"
