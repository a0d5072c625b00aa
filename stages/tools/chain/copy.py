"""The code of the last stage again, byte for byte, in the finished package."""

from collections.abc import Iterator

from .model import Chain, Stage, files_under
from .progress import write


def copied_files(stage: Stage) -> set[str]:
    """The files of a stage that its copy holds: the lesson, the diff and the tests stay with the stage."""
    return {file for file in stage.files() if not file.startswith("tests/") and not file.endswith(".md")}


def copy_faults(chain: Chain) -> Iterator[str]:
    """Every way in which the copy is none."""
    for file, done in _differences(chain):
        yield f"{chain.copy}/{file} {done}: run python stages/chain.py write"


def renew_copy(chain: Chain) -> Iterator[str]:
    """Make the copy one; yields a line for each file that was not as in the stage."""
    for file, done in list(_differences(chain)):
        is_wanted = file in copied_files(chain.stages[-1])
        content = (chain.stages[-1].folder / file).read_bytes() if is_wanted else None
        write(chain.root / chain.copy / file, content)
        yield f"{chain.copy}/{file} {done}: mended"


def _differences(chain: Chain) -> Iterator[tuple[str, str]]:
    """Files of the copy, relative to it, and what is wrong with each."""
    if chain.copy is None:
        return
    last, folder = chain.stages[-1], chain.root / chain.copy
    wanted, there = copied_files(last), files_under(folder)
    for file in sorted(wanted | there):
        if file not in there:
            yield file, "is missing"
        elif file not in wanted:
            yield file, f"is not in {last.path}"
        elif (folder / file).read_bytes() != (last.folder / file).read_bytes():
            yield file, f"is not as in {last.path}"
