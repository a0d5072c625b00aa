"""Every way in which the stages and the package can differ from chain.toml, one line each."""

from collections.abc import Iterator
from contextlib import suppress

from .diffs import diff_md
from .lines import added_lines, optional_lines
from .model import ALL_OTHERS, BRANCH, Chain, ChainError, Change, Link, Package, Stage, is_free


def faults(chain: Chain) -> list[str]:
    """Return all faults in the structure of the chain. Runs no tests."""
    result = [f"{path} is not in chain.toml" for path in _unlisted(chain)]
    for stage in chain.lessons:
        result += _declared(stage)
        result += _undeclared(stage)
        result += _size(stage)
        result += _order(stage)
        result += _diff_md(stage)
    if chain.package:
        result += _package_declared(chain.package)
        result += _package_undeclared(chain.package)
        result += _package_paths(chain.package)
    return result


def _unlisted(chain: Chain) -> list[str]:
    places = [path for name in ("s[0-9]*_*", f"{BRANCH}*") for path in (chain.root / "stages").glob(name)]
    return sorted({f"stages/{path.name}" for path in places if path.is_dir()} - {stage.path for stage in chain.lessons})


def _declared(stage: Stage) -> Iterator[str]:
    """Yield each declaration in chain.toml that does not hold."""
    yield from _repeated(stage)
    for change in stage.changes:
        if is_free(change.file):
            yield f"{stage.path}/{change.file} differs in every stage: take it out of chain.toml"
        elif fault := _fault_of(change, stage):
            yield f"{stage.path}/{change.file} {fault}"


def _repeated(link: Link) -> Iterator[str]:
    files = [change.file for change in link.changes]
    for file in dict.fromkeys(files):
        if files.count(file) > 1:
            yield f"{link.path}/{file} is declared {files.count(file)} times"


def _fault_of(change: Change, stage: Stage) -> str:
    before, now = stage.before.content(change.file) if stage.before else None, stage.content(change.file)
    if change.kind != "removed" and now is None:
        return f"is declared {change.kind} but does not exist"
    if change.kind == "removed" and now is not None:
        return "is declared removed but still exists"
    if change.kind == "new" and before is not None:
        return "is declared new but is in the previous stage"
    if change.kind != "new" and before is None:
        return f"is declared {change.kind} but is not in the previous stage"
    if change.kind == "changed" and before == now:
        return "is declared changed but is the same as in the previous stage"
    return ""


def _undeclared(stage: Stage) -> Iterator[str]:
    """Yield each file that differs from the previous stage and is not declared."""
    declared = {change.file for change in stage.changes}
    for file in sorted(stage.files() | (stage.before.files() if stage.before else set())):
        before, now = stage.before.content(file) if stage.before else None, stage.content(file)
        if file in declared or is_free(file) or before == now:
            continue
        if before is None:
            yield f"{stage.path}/{file} is new but not declared"
        elif now is None:
            yield f"{stage.path}/{file} is missing but not declared removed"
        else:
            yield f"{stage.path}/{file} differs from the previous stage but is not declared changed"


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


def _order(stage: Stage) -> Iterator[str]:
    """Yield a fault if the lesson's files are not the first, or the optional files not the last."""
    files = [change.file for change in stage.changes]
    if files[: len(stage.lesson)] != [*stage.lesson]:
        yield f"{stage.path}: the files of its lesson ({', '.join(stage.lesson)}) are not the first of its files"
    if {*files[len(files) - len(stage.optional.files) :]} != {*stage.optional.files}:
        yield f"{stage.path}: its optional files ({', '.join(stage.optional.files)}) are not the last of its files"


def _diff_md(stage: Stage) -> Iterator[str]:
    with suppress(ChainError):  # a file that is not Python: _size names it
        if stage.text("DIFF.md") != diff_md(stage):
            yield f"{stage.path}/DIFF.md is not current: run python stages/chain.py write"


def _package_declared(package: Package) -> Iterator[str]:
    """Yield each declaration of the package's files that does not hold."""
    yield from _repeated(package)
    origins, last = package.origins(), package.before
    for change in package.changes:
        where = f"{package.path}/{change.file}"
        if change.kind == "removed":
            if last.content(change.file) is None:
                yield f"{where} is declared removed, and {last.path}/{change.file} does not exist"
            for place in package.places(change.file):
                if package.content(place) is not None:
                    yield f"{last.path}/{change.file} is declared removed, and {package.path}/{place} still exists"
        elif change.file not in origins:
            yield f"{where} is declared changed, and paths gives no file of {last.path} this place"
        elif package.content(change.file) is None:
            yield f"{where} is declared changed but does not exist"
        elif package.content(change.file) == last.content(origins[change.file]):
            yield f"{where} is declared changed but is the same as {last.path}/{origins[change.file]}"


def _package_undeclared(package: Package) -> Iterator[str]:
    """Yield each file of the last stage that the package does not have byte for byte, without a declaration."""
    declared, last = {change.file for change in package.changes}, package.before
    removed = {change.file for change in package.changes if change.kind == "removed"}
    for place, file in sorted(package.origins().items()):
        content = package.content(place)
        if place in declared or file in removed or content == last.content(file):
            continue
        if content is None:
            yield f"{package.path}/{place} is missing, and {last.path}/{file} is not declared removed"
        else:
            yield f"{package.path}/{place} differs from {last.path}/{file} but is not declared changed"


def _package_paths(package: Package) -> Iterator[str]:
    """Yield each file without a place, each path without a file, and each extra file in a folder that is copied."""
    files, origins, last = (
        {file for file in package.before.files() if not is_free(file)},
        package.origins(),
        package.before,
    )
    removed = {change.file for change in package.changes if change.kind == "removed"}
    for file in sorted(files - removed):
        if not package.places(file):
            yield f"{last.path}/{file} has no place in [package.paths], and is not declared removed"
    for key, places in package.paths.items():
        if key != ALL_OTHERS and not any(file == key or (key.endswith("/") and file.startswith(key)) for file in files):
            yield f"chain.toml: [package.paths] names {key!r}, which {last.path} does not have"
        if key != ALL_OTHERS and key.endswith("/"):
            for file in sorted(package.files() - {*origins}):
                if file.startswith(places[0]):
                    yield f"{package.path}/{file} is not in {last.path}/{key}"
