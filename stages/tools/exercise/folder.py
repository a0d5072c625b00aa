"""exercises/sN: a copy of a stage that runs, with the functions of the exercise's steps left open for the learner.

A new function raises NotImplementedError; a function that the previous stage has starts with that stage's body.
"""

import hashlib
import json
import shutil
from pathlib import Path

from ..chain.model import ChainError, FunctionName, Stage, Step, files_under
from .functions import Function, find, missing_names

RECORD = ".written.json"  # digests of the files as written, to detect the learner's work
AT = ".step"  # the learner's current step


def exercise_folder(stage: Stage) -> Path:
    return stage.root / "exercises" / stage.key


def write_exercise(stage: Stage, first: int, force: bool) -> Path:
    """Write exercises/sN with the functions of step `first` and later open.

    Raise ChainError, and change nothing, if the folder holds the learner's work, unless `force` is set.
    """
    step_of(stage, first)
    folder = exercise_folder(stage)
    if (work := changed_by_learner(folder)) and not force:
        raise ChainError(f"exercises/{stage.key} holds your work ({', '.join(work)}): --force discards it")
    opened = open_functions(stage, first)  # first, so that a mistake in chain.toml does not cost the folder
    if folder.exists():
        shutil.rmtree(folder)
    copy_stage(stage, folder, opened)
    (folder / RECORD).write_text(json.dumps(_digests(folder)), encoding="utf-8")
    remember_step(stage, first)
    return folder


def changed_by_learner(folder: Path) -> list[str]:
    """Return the files of an exercise that differ from what write_exercise() wrote."""
    if not folder.exists():
        return []
    record = folder / RECORD
    written = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    now = _digests(folder)
    return sorted(file for file in written.keys() | now.keys() if written.get(file) != now.get(file))


def copy_stage(stage: Stage, folder: Path, opened: dict[str, str]) -> None:
    """Copy a stage, with the given texts for some files, and without DIFF.md, which holds the solution."""
    for file in sorted({*stage.files(), *opened} - {"DIFF.md"}):
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        if file in opened:
            target.write_text(opened[file], encoding="utf-8")
        else:
            shutil.copyfile(stage.folder / file, target)


def open_functions(stage: Stage, first: int) -> dict[str, str]:
    """Return the texts of the files that have functions of step `first` or later, with those functions open."""
    texts: dict[str, str] = {}
    for step in stage.steps[first - 1 :]:
        for name in step.functions:
            text = texts.get(name.file, stage.text(name.file))
            function = _find(stage, text, name)
            texts[name.file] = function.with_body(_starting_body(stage, step, name, function))
    return texts


def _starting_body(stage: Stage, step: Step, name: FunctionName, function: Function) -> str:
    """Return the text that replaces the solution."""
    mark = f"{function.indent}# EXERCISE step {step.number}: {step.title}\n"
    before, now = (side.text(name.file) if side else "" for side in (stage.before, stage))
    old = find(before, name.name) if before else None
    if old and old.body.strip():
        names = missing_names(name.name, before, now)
        if names:
            mark += (
                f"{function.indent}# The previous stage used names that this stage does not have: {', '.join(names)}\n"
            )
        if all(each.isidentifier() for each in names):  # an import is easily fixed
            return mark + old.body_at(function.indent)
        mark += "".join(f"{function.indent}#     {line}\n" for line in old.body_at("").splitlines())
    message = json.dumps(f"step {step.number}, {step.title}: {step.tests[0]}", ensure_ascii=False)
    return f"{mark}{function.indent}raise NotImplementedError({message})\n"


def reveal(stage: Stage, name: str) -> str:
    """Return the solution of one function, named as in chain.toml or by the end of that name."""
    functions = [each for step in stage.steps for each in step.functions]
    matches = [each for each in functions if f":{each}".replace(":", ".").endswith(f".{name.replace(':', '.')}")]
    if len(matches) != 1:
        count = "none" if not matches else "more than one"
        raise ChainError(f"{count} of the exercise's functions is called {name!r}: {', '.join(map(str, functions))}")
    function = _find(stage, stage.text(matches[0].file), matches[0])
    return f"# {stage.path}/{matches[0].file}\n{function.head}{function.body}"


def step_of(stage: Stage, number: int) -> Step:
    """Return the step with that number. Raise ChainError if there is none."""
    if not stage.steps:
        raise ChainError(f"stage {stage.number} has no exercise; {stage.path}/README.md suggests experiments")
    if not 1 <= number <= len(stage.steps):
        raise ChainError(f"there is no step {number}: {stage.key} has steps 1 to {len(stage.steps)}")
    return stage.steps[number - 1]


def what_next(stage: Stage, first: int) -> str:
    """Return instructions for the learner, after the exercise was written."""
    steps = stage.steps[first - 1 :]
    minutes = sum(step.minutes for step in stage.required_steps[first - 1 :])
    lines = [
        f"exercises/{stage.key} is ready: {len(steps)} step{'s' * (len(steps) > 1)}, about {minutes} minutes.",
        *(f"  step {each.number}, {each.minutes} min: {each.title}\n{_places(each)}" for each in steps),
        f"Begin with step {first}.",
        how_to(stage, first),
    ]
    return "\n".join(lines)


def experiments(stage: Stage) -> str:
    """Return the experiments of a stage, one a line."""
    return "\n".join(f"  {number}. {experiment}" for number, experiment in enumerate(stage.tries, 1))


def how_to(stage: Stage, number: int, function: str | None = None) -> str:
    """Return the files to edit in a step, and helpful commands, ready to paste.

    function: the function whose solution to offer; by default, any of the step's.
    """
    step, make = step_of(stage, number), f"make exercise STAGE={stage.number}"
    files = ", ".join(f"exercises/{stage.key}/{file}" for file in dict.fromkeys(each.file for each in step.functions))
    others = [] if function else [name.name for name in step.functions[1:]]
    only = f" STEP={number}" if stage.is_optional(step) else ""
    lines = [
        f"Look for EXERCISE step {number} in {files}.",
        f"  is it right?   make check STAGE={stage.number}{only}",
        f"  a hint:        {make} STEP={number} ARGS=--hint",
        f'  a bigger one:  {make} STEP={number} ARGS="--hint 2"',
        f'  the solution:  {make} ARGS="--reveal {function or step.functions[0].name}"',
        *([f"                 or of {', '.join(others)}"] if others else []),
    ]
    return "\n".join(lines)


def remember_step(stage: Stage, number: int) -> None:
    """Store the number of the learner's current step."""
    (exercise_folder(stage) / AT).write_text(f"{number}\n", encoding="utf-8")


def remembered_step(stage: Stage) -> int:
    """Return the learner's step at the last check, or the first step if nothing was checked."""
    file = exercise_folder(stage) / AT
    text = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    return int(text) if text.isdigit() and 1 <= int(text) <= len(stage.steps) else 1


def _places(step: Step) -> str:
    """Return the functions of a step, file by file."""
    files: dict[str, list[str]] = {}
    for file, name in step.functions:
        files.setdefault(file, []).append(name)
    return "\n".join(f"      {file}: {', '.join(names)}" for file, names in files.items())


def _find(stage: Stage, text: str, name: FunctionName) -> Function:
    try:
        function = find(text, name.name)
    except ChainError as error:
        raise ChainError(f"{stage.path}/{name.file}: {error}") from None
    if function is None:
        raise ChainError(f"chain.toml: {stage.path}/{name.file} has no function {name.name}")
    return function


def _digests(folder: Path) -> dict[str, str]:
    return {file: hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in files_under(folder)}
