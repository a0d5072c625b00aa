"""A link to read, file by file in the order of chain.toml: in a terminal, or as the stage's DIFF.md."""

import os
from collections.abc import Iterator
from itertools import dropwhile

from .git import git
from .lines import added_lines, optional_lines
from .model import ChainError, Change, Stage

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


def contents(stage: Stage) -> list[str]:
    """The files of a link in reading order, a line each."""
    of = f"what changes against {stage.before.name}" if stage.before else "in reading order"
    rows = [
        (f"{number}.", change.file, f"{_kind(stage, change)}, {_size(stage, change)}", change.why)
        for number, change in enumerate(stage.changes, 1)
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"  {a:{widths[0]}} {b:{widths[1]}}  {c:{widths[2]}}  {d}" for a, b, c, d in rows]
    if num_first := len(stage.lesson):
        lines[num_first:num_first] = ["", "  Skip on first reading:"]
    return [f"{stage.name}: {of}, {len(rows)} files", "", *lines]


def show(stage: Stage, color: bool, only: str | None = None) -> Iterator[str]:
    """The link for a terminal: its contents, and then in reading order each file's `why` above its diff.

    only: that file alone, without the contents. Of the first stage the files of the lesson are shown.
    """
    wanted = (only,) if only else stage.lesson or tuple(change.file for change in stage.changes)
    shown = [change for change in stage.changes if change.file in wanted]
    if not shown:
        files = ", ".join(change.file for change in stage.changes)
        raise ChainError(f"{stage.key} does not change {only!r}; it changes {files}")
    bold, plain = ("\033[1m", "\033[0m") if color else ("", "")
    if only is None:
        one_file = f'One file alone: make diff STAGE={stage.number} ARGS="--file {shown[0].file}"'
        yield "\n".join([*contents(stage), "", one_file, ""])
    for change in shown:
        number = stage.changes.index(change) + 1
        title = f"{number} of {len(stage.changes)}: {change.file}, {_kind(stage, change)}"
        diff = "\n".join(hunks(stage, change.file, color) if stage.before else stage.text(change.file).splitlines())
        yield f"{bold}=== {title} {'=' * (100 - len(title))}{plain}\n    {change.why}\n\n{diff}\n"


def diff_md(stage: Stage) -> str:
    """What DIFF.md must hold."""
    note = "<!-- Made by `python stages/chain.py write` from stages/chain.toml and the code. -->\n\n"
    return note + (_link_md(stage) if stage.before else _first_md(stage))


def _first_md(stage: Stage) -> str:
    lines = [
        f"# {stage.name}, in reading order\n",
        f"The first stage: there is nothing to compare it with. {added_lines(stage)} lines of code (blank lines,",
        f"comments and docstrings aside) in {len(stage.changes)} files.\n",
    ]
    rest = [(number, change) for number, change in enumerate(stage.changes, 1) if change.file not in stage.lesson]
    if stage.lesson:
        lines.append(f"{len(stage.lesson)} of them are the lesson:\n")
        lines += [_change_md(stage, change, n) for n, change in enumerate(stage.changes[: len(stage.lesson)], 1)]
        lines.append("## Skip on first reading\n")
    for number, change in rest:
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
        "which each stage writes anew. A new file is folded.",
        f"In colour: `make diff STAGE={stage.number}`.\n",
    ]
    return "\n".join(head + [_change_md(stage, change, number) for number, change in enumerate(stage.changes, 1)])


def _change_md(stage: Stage, change: Change, number: int) -> str:
    """A file's heading, why it changes, and its diff; a new file in full, folded."""
    if change.kind == "removed":
        return f"## {number}. {change.file}: removed, {_size(stage, change)}\n\n{change.why}\n"
    title = f"## {number}. [{change.file}]({change.file}): {_kind(stage, change)}, {_size(stage, change)}"
    if change.kind == "new":
        code = _fenced("python" if change.file.endswith(".py") else "", stage.text(change.file).rstrip("\n"))
        folded = f"<details><summary>{change.file} in full</summary>\n\n{code}\n\n</details>"
        return f"{title}\n\n{change.why}\n\n{folded}\n"
    return f"{title}\n\n{change.why}\n\n{_fenced('diff', chr(10).join(hunks(stage, change.file, color=False)))}\n"


def _fenced(language: str, text: str) -> str:
    """A block of code: its fence is longer than any in the text."""
    fence = "````" if "```" in text else "```"
    return f"{fence}{language}\n{text}\n{fence}"


def _size(stage: Stage, change: Change) -> str:
    """How much of it there is to read."""
    if change.kind == "removed":
        assert stage.before, "the first stage removes nothing"
        return _lines(stage.before, change.file)
    if change.kind == "new":
        return _lines(stage, change.file)
    lines = hunks(stage, change.file, color=False)
    added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    return f"+{added} -{removed}"


def _kind(stage: Stage, change: Change) -> str:
    return f"{change.kind}, optional" if change.file in stage.optional.files else change.kind


def _optional_md(stage: Stage) -> str:
    """What DIFF.md says of the optional half, if there is one."""
    return f", and {optional_lines(stage)} more in the optional half, which comes last" if stage.optional.files else ""


def _lines(stage: Stage, file: str) -> str:
    count = len(stage.text(file).splitlines())
    return f"{count} line{'' if count == 1 else 's'}"
