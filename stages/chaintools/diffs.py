"""A link to read, file by file in the order of chain.toml: in a terminal, or as the stage's DIFF.md."""

import os
from collections.abc import Iterator
from itertools import dropwhile

from .git import git
from .lines import added_lines, optional_lines
from .model import Change, Stage

# All that a reader's own git settings could change in a diff is said here, so that DIFF.md is the same for everyone.
OPTIONS = (
    *("--no-ext-diff", "--no-textconv", "--no-renames", "--diff-algorithm=histogram", "--indent-heuristic"),
    *("--unified=3", "--inter-hunk-context=0", "--src-prefix=a/", "--dst-prefix=b/"),
)


def hunks(stage: Stage, file: str, color: bool) -> list[str]:
    """The lines of git's diff of one file against the stage before; a file that is not there counts as empty."""
    sides = [f"{side.path}/{file}" if side and side.text(file) else os.devnull for side in (stage.before, stage)]
    config = ("-c", "diff.suppressBlankEmpty=false")
    when = "--color=always" if color else "--color=never"
    diff = git(stage.root, *config, "diff", "--no-index", when, *OPTIONS, "--", *sides, codes=(0, 1))
    return list(dropwhile(lambda line: "@@" not in line, diff.stdout.decode(errors="replace").split("\n")))[:-1]


def show(stage: Stage, color: bool) -> Iterator[str]:
    """The link in reading order for a terminal: each file's `why` above its diff."""
    bold, plain = ("\033[1m", "\033[0m") if color else ("", "")
    for number, change in enumerate(stage.changes, 1):
        title = f"{number} of {len(stage.changes)}: {change.file}, {_kind(stage, change)}"
        diff = "\n".join(hunks(stage, change.file, color))
        yield f"{bold}=== {title} {'=' * (100 - len(title))}{plain}\n    {change.why}\n\n{diff}\n"


def diff_md(stage: Stage) -> str:
    """What DIFF.md must hold."""
    note = "<!-- Made by `python stages/chain.py write` from stages/chain.toml and the code. -->\n\n"
    return note + (_link_md(stage) if stage.before else _first_md(stage))


def _first_md(stage: Stage) -> str:
    lines = [
        f"# {stage.name}, in reading order\n",
        f"The first stage: there is nothing to compare it with. {added_lines(stage)} lines of code (blank lines,",
        f"comments and docstrings aside) in {len(stage.changes)} files:\n",
    ]
    for number, change in enumerate(stage.changes, 1):
        lines.append(f"{number}. [{change.file}]({change.file}), {_lines(stage, change.file)}: {change.why}")
    return "\n".join(lines) + "\n"


def _link_md(stage: Stage) -> str:
    assert stage.before, "only a stage that has one before it has a link"
    folder = os.path.relpath(stage.before.folder, stage.folder).replace(os.sep, "/")
    head = [
        f"# {stage.name}: what changes against [{stage.before.name}]({folder}/)\n",
        f"{len(stage.changes)} files, in reading order; {added_lines(stage)} lines of code are added (blank lines,",
        f"comments and docstrings aside){_optional_md(stage)}.",
        "Every other file is the same, byte for byte, but for `__init__.py`, README.md and tests/,",
        "which each stage writes anew.",
        f"In colour: `python stages/chain.py diff {stage.key}`.\n",
    ]
    return "\n".join(head + [_change_md(stage, change, number) for number, change in enumerate(stage.changes, 1)])


def _change_md(stage: Stage, change: Change, number: int) -> str:
    if change.kind == "removed":
        assert stage.before, "the first stage removes nothing"
        return f"## {number}. {change.file}: removed, {_lines(stage.before, change.file)}\n\n{change.why}\n"
    if change.kind == "new":
        size = _lines(stage, change.file)
        return f"## {number}. [{change.file}]({change.file}): {_kind(stage, change)}, {size}\n\n{change.why}\n"
    lines = hunks(stage, change.file, color=False)
    added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    fence = "````" if any("```" in line for line in lines) else "```"
    title = f"## {number}. [{change.file}]({change.file}): {_kind(stage, change)}, +{added} -{removed}"
    return "\n".join([title, "", change.why, "", f"{fence}diff", *lines, fence, ""])


def _kind(stage: Stage, change: Change) -> str:
    return f"{change.kind}, optional" if change.file in stage.optional.files else change.kind


def _optional_md(stage: Stage) -> str:
    """What DIFF.md says of the optional half, if there is one."""
    return f", and {optional_lines(stage)} more in the optional half, which comes last" if stage.optional.files else ""


def _lines(stage: Stage, file: str) -> str:
    count = len(stage.text(file).splitlines())
    return f"{count} line{'' if count == 1 else 's'}"
