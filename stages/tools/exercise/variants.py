"""tests/exercises/sN.py: for each step, solutions that must be green and mistakes that must be red.

    class Step1:
        class right_pops_one_at_a_time:
            '''Pop the blocks one at a time.'''
            class BlockPool:
                def get_new_blocks(self, count): ...
        class wrong_checks_nothing:
            '''Take what is there.'''
            red = "a piece of what `make check` prints"
            unseen = "why `make play` shows no difference, if so"
            class BlockPool:
                def get_new_blocks(self, count): ...

The file is parsed and never imported. A variant replaces the bodies of some functions of its step, or of earlier ones;
the others are the stage's own, and later steps are open. With a `right_` variant, every test of the step is green, and
so is the gain test once all steps are solved. A `wrong_` variant turns a test of the step red. The first red test's
report contains `red`, and a docstring or a message: a person can read it. With all other steps solved, `make play`
shows the mistake, unless it is `unseen`: tests/test_page_play.py tries both.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple

from ..chain.model import GAIN_TEST, ChainError, FunctionName, Stage, Step
from .folder import open_functions
from .functions import find, find_names
from .report import Report
from .run import Version, run_versions

ENOUGH = 2  # solutions, and as many mistakes


class Variant(NamedTuple):
    """A solution of a step, or a mistake."""

    step: Step
    name: str  # right_... or wrong_...
    docstring: str
    red: str  # a piece of the report of the first red test; empty for a solution
    unseen: str  # why `make play` can't show a mistake; empty if it can
    functions: tuple[str, ...]  # the dotted names of what it replaces

    @property
    def is_right(self) -> bool:
        return self.name.startswith("right_")

    @property
    def path(self) -> str:
        return f"Step{self.step.number}.{self.name}"


def variants_file(stage: Stage) -> str:
    return f"tests/exercises/{stage.key}.py"


def variant_faults(stage: Stage) -> list[str]:
    """Run every variant of a stage's exercise, all in one process. Return a fault for each with the wrong color."""
    path = stage.root / variants_file(stage)
    if not stage.steps or not path.is_file():
        return []
    source = path.read_text(encoding="utf-8")
    try:
        variants = list(_variants(stage, ast.parse(source)))
        faults = [*_declared_faults(stage, variants)]
        versions = [] if faults else [version for each in variants for version in _versions(stage, source, each)]
    except (ChainError, SyntaxError) as error:
        faults, versions = [str(error)], []
    if not faults:
        reports = run_versions(stage, versions)
        faults = [fault for each in variants for fault in _faults(each, reports)]
    return [f"{variants_file(stage)}: {fault}" for fault in faults]


def solutions(stage: Stage) -> dict[str, dict[str, str]]:
    """Return, for the last solution of each step, the texts of the stage's files with it, by the solution's name."""
    source = (stage.root / variants_file(stage)).read_text(encoding="utf-8")
    last = {each.step: each for each in _variants(stage, ast.parse(source)) if each.is_right}
    return {each.path: _replaced(stage, source, each, {}) for each in last.values()}


def mistakes(stage: Stage) -> Iterator[tuple[Variant, dict[str, str]]]:
    """Yield each mistake, with the texts of the stage's files that have it and the stage's own code for the rest."""
    source = (stage.root / variants_file(stage)).read_text(encoding="utf-8")
    for each in _variants(stage, ast.parse(source)):
        if not each.is_right:
            yield each, _replaced(stage, source, each, {})


def _variants(stage: Stage, tree: ast.Module) -> Iterator[Variant]:
    steps = {f"Step{step.number}": step for step in stage.steps}
    for group in _classes(tree):
        if group.name not in steps:
            raise ChainError(f"{group.name} is not a step: {stage.key} has {', '.join(steps)}")
        for node in _classes(group):
            if not node.name.startswith(("right_", "wrong_")):
                raise ChainError(f"{group.name}.{node.name} must be called right_... or wrong_...")
            functions = tuple(name for name, _ in find_names(node))
            docstring, step = ast.get_docstring(node) or "", steps[group.name]
            yield Variant(step, node.name, docstring, _text(node, "red"), _text(node, "unseen"), functions)


def _classes(tree: ast.Module | ast.ClassDef) -> list[ast.ClassDef]:
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


def _text(node: ast.ClassDef, name: str) -> str:
    """Return the string that a variant assigns to a name, or an empty one."""
    for each in node.body:
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name) and each.targets[0].id == name:
            return str(ast.literal_eval(each.value))
    return ""


def _declared_faults(stage: Stage, variants: list[Variant]) -> Iterator[str]:
    for step in stage.steps:
        mine = [each for each in variants if each.step == step]
        num_right = sum(each.is_right for each in mine)
        for count, name in ((num_right, "right"), (len(mine) - num_right, "wrong")):
            if count < ENOUGH:
                yield f"Step{step.number} has {count} {name}_ variants, and needs {ENOUGH}"
    for each in variants:
        if not each.docstring:
            yield f"{each.path} has no docstring"
        if bool(each.red) == each.is_right:
            yield f"{each.path}: a wrong_ variant has a `red`, and a right_ one has none"
        if each.unseen and each.is_right:
            yield f"{each.path}: only a wrong_ variant can be `unseen`"
        known = {name.name for name in _functions(stage, each.step)}
        if unknown := [name for name in each.functions if name not in known] or ([] if each.functions else ["nothing"]):
            yield f"{each.path} replaces {', '.join(unknown)}; up to its step there are {', '.join(sorted(known))}"


def _functions(stage: Stage, step: Step) -> list[FunctionName]:
    """Return what a learner has written at the end of a step."""
    return [name for each in stage.steps[: step.number] for name in each.functions]


def _versions(stage: Stage, source: str, variant: Variant) -> Iterator[Version]:
    """Yield the stages to test: with later steps open, and for a solution with all steps solved."""
    opened = open_functions(stage, variant.step.number + 1)
    yield Version(_folder(variant), _replaced(stage, source, variant, opened), variant.step.tests)
    if variant.is_right:
        yield Version(_folder(variant, "_solved"), _replaced(stage, source, variant, {}), (GAIN_TEST,))


def _folder(variant: Variant, suffix: str = "") -> str:
    return f"step{variant.step.number}_{variant.name}{suffix}"


def _replaced(stage: Stage, source: str, variant: Variant, opened: dict[str, str]) -> dict[str, str]:
    """Return the texts of a stage's files with the variant's functions in the place of the stage's own."""
    texts = dict(opened)
    for file, name in _functions(stage, variant.step):
        if name in variant.functions:
            text = texts.get(file, stage.text(file))
            target, mine = find(text, name), find(source, f"{variant.path}.{name}")
            assert target and mine, f"{name} is in both files"
            texts[file] = target.with_body(mine.body_at(target.indent))
    return texts


def _faults(variant: Variant, reports: dict[str, list[Report]]) -> Iterator[str]:
    """Yield what is wrong with the tests' colors."""
    mine = reports[_folder(variant)]
    red = [report for report in mine if report.is_red]
    if variant.is_right:
        red += [report for report in reports[_folder(variant, "_solved")] if report.is_red]
        yield from (f"{variant.path}: {report.test} is red:\n" + "\n".join(report.lines()) for report in red)
        for test in variant.step.tests:
            if not any(report.is_about(test) for report in mine):
                yield f"{variant.path}: {test} did not run"
        if not reports[_folder(variant, "_solved")]:
            yield f"{variant.path}: {GAIN_TEST} did not run"
    elif not red:
        yield f"{variant.path}: all tests of step {variant.step.number} are green ({len(mine)})"
    else:
        printed = "\n".join(red[0].lines())
        if " ".join(variant.red.split()) not in " ".join(printed.split()):
            yield f"{variant.path}: the first red test does not say {variant.red!r}:\n{printed}"
        elif not red[0].has_words:
            yield f"{variant.path}: the first red test needs a docstring, or a message in words:\n{printed}"
