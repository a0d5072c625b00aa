"""Every way in which the stages can differ from what chain.toml says, one line each."""

from collections.abc import Iterator
from contextlib import suppress

from .copy import copy_faults
from .diffs import diff_md
from .lines import added_lines, optional_lines
from .model import Chain, ChainError, Change, Stage, is_free


def faults(chain: Chain) -> list[str]:
    """All faults in the structure of the chain; none if all is as declared. Takes no test run."""
    found = [f"{path} is not in chain.toml" for path in _unlisted(chain)]
    for stage in chain.stages:
        found += _declared(stage)
        found += _undeclared(stage)
        found += _size(stage)
        found += _diff_md(stage)
    return [*found, *copy_faults(chain)]


def _unlisted(chain: Chain) -> list[str]:
    folders = {f"stages/{path.name}" for path in (chain.root / "stages").glob("s[0-9]*_*") if path.is_dir()}
    return sorted(folders - {stage.path for stage in chain.stages})


def _declared(stage: Stage) -> Iterator[str]:
    """What chain.toml says of a file and is not so."""
    files = [change.file for change in stage.changes]
    for change in stage.changes:
        where = f"{stage.path}/{change.file}"
        if files.count(change.file) > 1:
            yield f"{where} is declared {files.count(change.file)} times"
        if is_free(change.file):
            yield f"{where} differs in every stage: take it out of chain.toml"
        elif fault := _fault_of(change, stage):
            yield f"{where} {fault}"


def _fault_of(change: Change, stage: Stage) -> str:
    before, now = _content(stage.before, change.file), _content(stage, change.file)
    if change.kind != "removed" and now is None:
        return f"is declared {change.kind} and is not there"
    if change.kind == "removed" and now is not None:
        return "is declared removed and is still there"
    if change.kind == "new" and before is not None:
        return "is declared new and is in the stage before"
    if change.kind != "new" and before is None:
        return f"is declared {change.kind} and is not in the stage before"
    if change.kind == "changed" and before == now:
        return "is declared changed and is the same as in the stage before"
    return ""


def _undeclared(stage: Stage) -> Iterator[str]:
    """Files that are not as in the stage before, without a word in chain.toml."""
    declared = {change.file for change in stage.changes}
    for file in sorted(stage.files() | (stage.before.files() if stage.before else set())):
        before, now = _content(stage.before, file), _content(stage, file)
        if file in declared or is_free(file) or before == now:
            continue
        if before is None:
            yield f"{stage.path}/{file} is new and not declared"
        elif now is None:
            yield f"{stage.path}/{file} is missing and not declared removed"
        else:
            yield f"{stage.path}/{file} differs from the stage before and is not declared changed"


def _size(stage: Stage) -> Iterator[str]:
    try:
        added, optional = added_lines(stage), optional_lines(stage)
    except ChainError as error:
        yield str(error)
        return
    if stage.budget is not None and added > stage.budget:
        yield f"{stage.path} adds {added} lines of code; its budget is {stage.budget}"
    if optional > stage.optional.budget:
        files = ", ".join(stage.optional.files)
        yield f"{stage.path} adds {optional} optional lines of code ({files}); their budget is {stage.optional.budget}"
    last = [change.file for change in stage.changes][len(stage.changes) - len(stage.optional.files) :]
    if {*stage.optional.files} != {*last}:
        yield f"{stage.path}: its optional files ({', '.join(stage.optional.files)}) are not the last of its files"
    if [change.file for change in stage.changes[: len(stage.lesson)]] != [*stage.lesson]:
        yield f"{stage.path}: the files of its lesson ({', '.join(stage.lesson)}) are not the first of its files"


def _diff_md(stage: Stage) -> Iterator[str]:
    with suppress(ChainError):  # not Python: _size names the file
        if stage.text("DIFF.md") != diff_md(stage):
            yield f"{stage.path}/DIFF.md is not current: run python stages/chain.py write"


def _content(stage: Stage | None, file: str) -> bytes | None:
    path = stage.folder / file if stage else None
    return path.read_bytes() if path and path.is_file() else None
