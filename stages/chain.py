"""The chain of stages: check it, read it, practice with it, and carry fixes through it.

    python stages/chain.py check                 is every difference between two stages declared in chain.toml?
    python stages/chain.py check --exercises s6  prove an exercise: its steps, and the solutions and mistakes that
                                                 tests/exercises/s6.py keeps; without a stage, all exercises
    python stages/chain.py diff 3                what stage 3 changes, in reading order; diff nanovllm for the package
    python stages/chain.py write                 write the DIFF.md of each stage
    python stages/chain.py size                  count the lines of code that each stage adds
    python stages/chain.py exercise 3            write stage 3 with the functions of its exercise left to you
    python stages/chain.py exercise 3 --check    check your solution, and count the gain; needs pytest and torch
    python stages/chain.py propagate s2          merge an edit of s2 forward, into stages, branches and the package

Everything else needs only Python >= 3.11 and git. See also exercise --help and propagate --help.
"""

import argparse
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script imports from its own folder

from stages.tools.chain.check import faults
from stages.tools.chain.diffs import diff_md, show, show_in_pager
from stages.tools.chain.lines import added_lines, optional_lines
from stages.tools.chain.load import load
from stages.tools.chain.model import Chain, ChainError
from stages.tools.chain.propagate import abort, begin, propagate
from stages.tools.exercise.folder import (
    changed_by_learner,
    exercise_folder,
    experiments,
    how_to,
    remembered_step,
    reveal,
    step_of,
    what_next,
    write_exercise,
)
from stages.tools.exercise.learner import check_exercise
from stages.tools.exercise.proof import declared_faults, proof_faults
from stages.tools.exercise.variants import variant_faults

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run one command on the repository at `root`. Return the exit status: 1 for faults or conflicts, 2 for misuse."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(load(root), options)
        return status
    except ChainError as error:
        print(f"chain: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of `diff 3 | less` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")
    check = commands.add_parser("check", help="compare the stages and the package with chain.toml")
    check.set_defaults(run=_check)
    check.add_argument(
        "--exercises",
        nargs="*",
        metavar="STAGE",
        help="prove the exercises: a step's tests are red before it and green after it, and so for the right and wrong "
        "variants in tests/exercises. With stages named, prove theirs and check nothing else",
    )
    diff = commands.add_parser("diff", help="show what a stage changes, in reading order")
    diff.set_defaults(run=_diff)
    diff.add_argument("stage", help="2, s2, s2_block_manager, more_kernel or nanovllm")
    diff.add_argument("--file", metavar="NAME", help="show only this file")
    diff.add_argument("--color", action="store_true", help="use color even if the output is not a terminal")
    commands.add_parser("write", help="write each DIFF.md").set_defaults(run=_write)
    commands.add_parser("size", help="count the lines of code that each stage adds").set_defaults(run=_size)
    _add_exercise(commands)
    forward = commands.add_parser(
        "propagate", help="merge an edit of a stage forward, into stages, branches and the package"
    )
    forward.set_defaults(run=_propagate)
    forward.add_argument("stage", nargs="?", help="the stage that was edited")
    forward.add_argument("--since", metavar="REV", help="the revision before the edit (default: HEAD)")
    forward.add_argument("--abort", action="store_true", help="restore all files as they were before propagate")
    return parser


def _add_exercise(commands: Any) -> None:
    exercise = commands.add_parser("exercise", help="write exercises/sN, with functions left to you")
    exercise.set_defaults(run=_exercise)
    exercise.add_argument("stage", help="2, s2, s2_block_manager or more_kernel")
    exercise.add_argument(
        "--step",
        type=int,
        metavar="K",
        help="start at this step, with the steps before it solved. If you have already begun, print how to continue",
    )
    exercise.add_argument("--check", action="store_true", help="test your current step, or only --step K")
    exercise.add_argument("--hint", type=int, nargs="?", const=1, choices=(1, 2), help="print a hint; write nothing")
    exercise.add_argument("--reveal", metavar="NAME", help="print the solution of a function; write nothing")
    exercise.add_argument("--force", action="store_true", help="discard your work in exercises/sN")


def _check(chain: Chain, options: argparse.Namespace) -> int:
    named = [chain.stage(name) for name in options.exercises or ()]
    stages = named or chain.lessons
    result = [*([] if named else faults(chain)), *(fault for stage in stages for fault in declared_faults(stage))]
    if options.exercises is not None and not result:  # a proof on a broken chain would prove nothing
        result = [fault for stage in stages for fault in [*proof_faults(stage), *variant_faults(stage)]]
    for fault in result:
        print(fault)
    if len(chain.stages) == 1:
        print(f"{chain.stages[0].key} is the only stage: there is no link to compare yet")
    checked = "exercises" if named else "stages" if options.exercises is None else "stages and exercises"
    keys = ", ".join(link.key for link in named or chain.links)
    print(f"faults: {len(result)}" if result else f"{checked} are as chain.toml says: {keys}")
    return 1 if result else 0


def _diff(chain: Chain, options: argparse.Namespace) -> int:
    is_terminal = sys.stdout.isatty()
    text = "\n".join(show(chain.link(options.stage), options.color or is_terminal, options.file))
    if not (is_terminal and show_in_pager(text)):
        print(text)
    return 0


def _write(chain: Chain, options: argparse.Namespace) -> int:
    for stage in chain.lessons:
        text = diff_md(stage)
        is_current = stage.text("DIFF.md") == text
        (stage.folder / "DIFF.md").write_text(text, encoding="utf-8")
        print(f"{stage.path}/DIFF.md: {'was current' if is_current else 'written'}")
    return 0


def _size(chain: Chain, options: argparse.Namespace) -> int:
    for stage in chain.lessons:
        print(_size_line(stage.name, added_lines(stage), stage.budget, len(stage.changes) - len(stage.optional.files)))
        if optional := stage.optional.files:
            print(_size_line("  optional", optional_lines(stage), stage.optional.budget, len(optional)))
    return 0


def _size_line(title: str, lines: int, budget: int | None, num_files: int) -> str:
    of = f"of {budget}" if budget else ""
    return f"{title:28} {lines:5} {of:8} lines, {num_files} file{'' if num_files == 1 else 's'}"


def _exercise(chain: Chain, options: argparse.Namespace) -> int:
    stage = chain.stage(options.stage)
    if stage.tries and not stage.steps:
        print(f"{stage.name} has no exercise. Try these on a copy:\n{experiments(stage)}")
        return 0
    step = step_of(stage, options.step or remembered_step(stage))
    if options.check:
        return 0 if check_exercise(stage, options.step) else 1
    if options.hint:
        print(textwrap.fill(f"step {step.number}, {step.title}: {step.hints[options.hint - 1]}", 110))
    elif options.reveal:
        print(reveal(stage, options.reveal), end="")
    elif not options.force and changed_by_learner(exercise_folder(stage)):
        print(f"Your work in exercises/{stage.key} stays as it is (ARGS=--force discards it).")
        print(how_to(stage, step.number))
    else:
        first = options.step or 1
        write_exercise(stage, first, options.force)
        print(what_next(stage, first))
    return 0


def _propagate(chain: Chain, options: argparse.Namespace) -> int:
    if options.abort:
        for file in abort(chain.root):
            print(f"{file}: restored")
        return 0
    if not options.stage:
        raise ChainError("propagate which stage? Name the one that was edited, or give --abort")
    progress = begin(chain, chain.stage(options.stage), options.since)
    lines = list(propagate(chain, progress))
    print("\n".join(lines) or "nothing to propagate")
    for file in progress.conflicts:
        print(f"conflict in {file}: resolve it and run the same command again, or propagate --abort", file=sys.stderr)
    if not progress.conflicts and lines:
        print("Next: python stages/chain.py write, then check.")
    return 1 if progress.conflicts else 0


if __name__ == "__main__":
    raise SystemExit(main())
