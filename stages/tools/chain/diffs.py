"""A link to read, file by file in the order of chain.toml: in a terminal, or as the stage's DIFF.md."""

import os
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from itertools import dropwhile

from .git import git
from .lines import added_lines, optional_lines
from .model import ChainError, Change, Link, Package, Stage
from .parts import old_text

# These options override everything in a reader's git settings that could change a diff: DIFF.md is the same for all.
OPTIONS = (
    *("--no-ext-diff", "--no-textconv", "--no-renames", "--diff-algorithm=histogram", "--indent-heuristic"),
    *("--unified=3", "--inter-hunk-context=0", "--src-prefix=a/", "--dst-prefix=b/"),
)


def hunks(link: Link, change: Change, color: bool) -> list[str]:
    """Return the lines of git's diff of one file against the previous stage; a missing file counts as empty."""
    now = os.devnull if change.kind == "removed" or not link.text(change.file) else f"{link.path}/{change.file}"
    when = "--color=always" if color else "--color=never"
    command = ("-c", "diff.suppressBlankEmpty=false", "diff", "--no-index", when, *OPTIONS, "--", "-", now)
    diff = git(link.root, *command, stdin=old_text(link, change).encode(), codes=(0, 1)).stdout
    return list(dropwhile(lambda line: "@@" not in line, diff.decode(errors="replace").split("\n")))[:-1]


def contents(link: Link) -> list[str]:
    """Return a table of the link's files in reading order, one per line."""
    title = f"what changes from {link.before.name}" if link.before else "in reading order"
    rows = [
        (f"{number}.", change.file, f"{_kind(link, change)}, {_size(link, change)}", change.why)
        for number, change in enumerate(link.changes, 1)
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    lines = [f"  {a:{widths[0]}} {b:{widths[1]}}  {c:{widths[2]}}  {d}" for a, b, c, d in rows]
    if num_first := len(_lesson(link)):
        lines[num_first:num_first] = ["", "  Skip on first reading:"]
    return [f"{link.name}: {title}, {len(rows)} files", "", *lines]


def show(link: Link, color: bool, only: str | None = None) -> Iterator[str]:
    """Yield the link for a terminal: its contents, then each file's `why` and diff, in reading order.

    only: show just this file, without the contents. For the first stage, show only the lesson's files.
    """
    shown = [_change_called(link, only)] if only else [each for each in link.changes if _is_in_lesson(link, each)]
    bold, plain = ("\033[1m", "\033[0m") if color else ("", "")
    if only is None:
        yield "\n".join([*contents(link), "", *_notes(link), ""])
    for change in shown:
        number = link.changes.index(change) + 1
        title = f"{number} of {len(link.changes)}: {_renamed(link, change)}, {_kind(link, change)}"
        diff = "\n".join(hunks(link, change, color) if link.before else link.text(change.file).splitlines())
        yield f"{bold}=== {title} {'=' * (100 - len(title))}{plain}\n    {change.why}\n\n{diff}\n"


def show_in_pager(text: str) -> bool:
    """Show `text` in the pager that git would use, and wait until it exits. Return False if there is none.

    It is the first of $GIT_PAGER, core.pager, $PAGER and less. A text that fits on the screen stays on it.
    """
    done = subprocess.run(["git", "var", "GIT_PAGER"], capture_output=True, text=True)
    pager = done.stdout.strip()
    if not pager or pager == "cat" or not shutil.which(pager.split()[0]):
        return False
    environment = {"LESS": "FRX", "LV": "-c", **os.environ}  # git's defaults: colors, and no pause for a short text
    process = subprocess.Popen(pager, shell=True, stdin=subprocess.PIPE, text=True, env=environment)
    try:
        process.communicate(text + "\n")
    except BrokenPipeError:  # the reader has seen enough
        process.wait()
    return True


def _lesson(link: Link) -> tuple[str, ...]:
    return link.lesson if isinstance(link, Stage) else ()


def _is_in_lesson(link: Link, change: Change) -> bool:
    return not _lesson(link) or change.file in _lesson(link)


def _change_called(link: Link, name: str) -> Change:
    """Return the change of the file called `name`, here or in the previous stage, in full or by its last part."""
    for change in link.changes:
        if name == change.file:
            return change
    for change in link.changes:
        if name == link.old_name(change) or change.file.endswith(f"/{name}"):
            return change
    files = ", ".join(change.file for change in link.changes)
    raise ChainError(f"{link.key} does not change {name!r}; it changes {files}")


def _notes(link: Link) -> Iterator[str]:
    """Yield notes on the list of files above."""
    if link.changes:
        yield f'One file alone: make diff STAGE={link.number} ARGS="--file {link.changes[0].file}"'
    if isinstance(link, Package):
        origins = link.origins()
        same = sum(link.content(place) == link.before.content(file) for place, file in origins.items())
        yield f"{same} more files of {link.before.name} are the same, byte for byte."
        new = f"New in {link.name}, and not shown: {', '.join(_new_in(link, {*origins}))}."
        yield textwrap.fill(new, 110, break_on_hyphens=False)


def _new_in(package: Package, places: set[str]) -> list[str]:
    """Return the package's new code files; a folder that has no file of the last stage stands for its files."""
    mixed = {folder for place in places for folder in _folders(place)}
    new: set[str] = set()
    for file in package.files() - places:
        if file.endswith(".py") and not file.endswith("__init__.py") and "tests/" not in file:
            new.add(next((folder for folder in _folders(file) if folder not in mixed), file))
    return sorted(new)


def _folders(file: str) -> list[str]:
    """Return the folders that a file is in, the outermost first.

    >>> _folders("backends/torch/sampler.py")
    ['backends/', 'backends/torch/']
    """
    parts = file.split("/")[:-1]
    return ["/".join(parts[: n + 1]) + "/" for n in range(len(parts))]


def _renamed(link: Link, change: Change) -> str:
    old = link.old_name(change)
    return change.file if old in (change.file, change.file.rpartition("/")[2]) else f"{old} -> {change.file}"


def diff_md(stage: Stage) -> str:
    """Return the text that the stage's DIFF.md should have."""
    note = "<!-- Made by `python stages/chain.py write` from stages/chain.toml and the code. -->\n\n"
    return note + (_link_md(stage) if stage.before else _first_md(stage))


def _first_md(stage: Stage) -> str:
    lines = [
        f"# {stage.name}, in reading order\n",
        f"The first stage: there is nothing to compare it with. {added_lines(stage)} lines of code (not counting blank",
        f"lines, comments and docstrings) in {len(stage.changes)} files.\n",
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
    assert stage.before, "the first stage is no link"
    folder = os.path.relpath(stage.before.folder, stage.folder).replace(os.sep, "/")
    optional = f", and {optional_lines(stage)} more in the optional half, which comes last" * bool(stage.optional.files)
    head = [
        f"# {stage.name}: what changes from [{stage.before.name}]({folder}/)\n",
        f"{len(stage.changes)} files, in reading order; {added_lines(stage)} lines of code are added (not counting",
        f"blank lines, comments and docstrings){optional}.",
        "Every other file is the same, byte for byte, except `__init__.py`, README.md and tests/,",
        "which each stage writes anew. New files are folded.",
        f"In color: `make diff STAGE={stage.number}`.\n",
    ]
    return "\n".join(head + [_change_md(stage, change, number) for number, change in enumerate(stage.changes, 1)])


def _change_md(stage: Stage, change: Change, number: int) -> str:
    """Return a file's heading, why it changes, and its diff; a new file in full, folded."""
    if change.kind == "removed":
        return f"## {number}. {change.file}: removed, {_size(stage, change)}\n\n{change.why}\n"
    title = f"## {number}. [{change.file}]({change.file}): {_kind(stage, change)}, {_size(stage, change)}"
    if change.kind == "new":
        code = _fenced("python" if change.file.endswith(".py") else "", stage.text(change.file).rstrip("\n"))
        folded = f"<details><summary>{change.file} in full</summary>\n\n{code}\n\n</details>"
        return f"{title}\n\n{change.why}\n\n{folded}\n"
    return f"{title}\n\n{change.why}\n\n{_fenced('diff', chr(10).join(hunks(stage, change, color=False)))}\n"


def _fenced(language: str, text: str) -> str:
    """Return a block of code whose fence is longer than any in the text."""
    fence = "````" if "```" in text else "```"
    return f"{fence}{language}\n{text}\n{fence}"


def _size(link: Link, change: Change) -> str:
    """Return how much of a file there is to read."""
    if change.kind == "removed":
        assert link.before, "the first stage removes nothing"
        return _lines(link.before, change.file)
    if change.kind == "new":
        return _lines(link, change.file)
    lines = hunks(link, change, color=False)
    added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    return f"+{added} -{removed}"


def _kind(link: Link, change: Change) -> str:
    is_optional = isinstance(link, Stage) and change.file in link.optional.files
    return f"{change.kind}, optional" if is_optional else change.kind


def _lines(link: Link, file: str) -> str:
    count = len(link.text(file).splitlines())
    return f"{count} line{'' if count == 1 else 's'}"
