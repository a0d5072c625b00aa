"""The museum of faults: what engines got wrong, planted into stages, and which of it your tests find. `make museum`.

    python -m stages.tools.museum                            the rooms, and what can be seen in them
    python -m stages.tools.museum 6                          write exercises/museum/s6.py, and later run its tests
    python -m stages.tools.museum --hint remembered-hits     what has to happen before anyone can notice the fault
    python -m stages.tools.museum --reveal remembered-hits   the fault

A room has a stage's code. Your tests must be green on the stage itself. They find a fault if one of them is red on a
copy of the stage that has it. stages/museum/faults.toml has the exhibits.
"""

import argparse
import difflib
import sys
import textwrap
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .chain import Chain, ChainError, Stage, load
from .exercise.report import Report
from .exercise.run import Version, run_versions

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path("stages/museum/faults.toml")
TESTS = "tests/test_museum.py"  # of a copy: the learner's tests
HEALTHY = "healthy"
START = '''\
"""Your tests for stage {number}'s room: green on the stage, red on its faults. `make museum STAGE={number}` runs them.

scripted.py has an engine whose model is a script: each token depends on everything that its sequence reads through its
block table, and tokens_alone() says what a request would get alone. step() and run() also check the engine's integrity.
"""

from .scripted import add, run, scripted_engine, tokens_alone, tokens_of


def test_a_request_alone_gets_its_tokens(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=16{options})
    prompt = add(engine, "a", num_tokens=5, max_tokens=8)
    assert tokens_of(run(engine)["a"]) == tokens_alone(prompt, 8)
'''


class Edit(NamedTuple):
    file: str  # of the stage
    old: str  # occurs once
    new: str


class Fault(NamedTuple):
    """An exhibit. faults.toml says what its fields are."""

    name: str
    stage: str
    project: str
    threads: tuple[str, ...]
    was: str
    figure: str
    here: str
    history: str
    edits: tuple[Edit, ...]

    @property
    def version(self) -> str:
        """The name of the copy that has the fault."""
        return self.name.replace("-", "_")

    def plant(self, stage: Stage) -> dict[str, str]:
        """Return the texts of the files that have the fault. Raise ChainError if it doesn't fit into the stage."""
        texts: dict[str, str] = {}
        for file, old, new in self.edits:
            text = texts.get(file, stage.text(file))
            if text.count(old) != 1:
                raise ChainError(f"{self.name}: {stage.path}/{file} has {text.count(old)} places for {old!r}")
            texts[file] = text.replace(old, new)
        return texts


def faults(root: Path = ROOT) -> list[Fault]:
    """Return the exhibits, in the order of the rooms."""
    entries = tomllib.loads((root / FAULTS).read_text(encoding="utf-8"))["fault"]
    return [
        Fault(**each | {"threads": tuple(each["threads"]), "edits": tuple(Edit(**edit) for edit in each["edits"])})
        for each in entries
    ]


def address(thread: str) -> str:
    """Return the address of a thread.

    >>> address("LMCache/LMCache#1034")
    'https://github.com/LMCache/LMCache/issues/1034'
    """
    repository, _, number = thread.partition("#")
    return f"https://github.com/{repository}/issues/{number}"


def visit(stage: Stage, exhibits: Sequence[Fault], tests: str) -> dict[str, list[Report]]:
    """Run tests on the stage and on a copy with each fault. Return the reports by version."""
    healthy: dict[str, dict[str, str]] = {HEALTHY: {}}
    texts = healthy | {fault.version: fault.plant(stage) for fault in exhibits}
    return run_versions(stage, [Version(name, {**each, TESTS: tests}, (TESTS,)) for name, each in texts.items()])


def red(reports: Sequence[Report]) -> list[str]:
    """Return the names of the tests that are red."""
    return [each.test.rpartition("::")[2] for each in reports if each.is_red]


# ---- the command


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Show the museum. Return the exit status: 0, 1 for tests that are red on the stage itself, or 2 for misuse."""
    parser = argparse.ArgumentParser(prog="python -m stages.tools.museum", description=__doc__.splitlines()[0])
    parser.add_argument("room", nargs="?", metavar="STAGE", help="4, s4 or s4_continuous_batching; default: list all")
    parser.add_argument("--hint", metavar="NAME", help="print what has to happen before a fault can be noticed")
    parser.add_argument("--reveal", metavar="NAME", help="print a fault")
    options = parser.parse_args(arguments)
    try:
        return show(load(root), faults(root), options)
    except ChainError as error:
        print(f"museum: {error}", file=sys.stderr)
        return 2


def show(chain: Chain, exhibits: Sequence[Fault], options: argparse.Namespace) -> int:
    """Print what the options ask for, and return the exit status."""
    if options.hint:
        print(textwrap.fill(called(options.hint, exhibits).history, 110))
        return 0
    if options.reveal:
        fault = called(options.reveal, exhibits)
        print("\n".join(planted(chain.stage(fault.stage), fault)))
        return 0
    if options.room is None:
        print("\n".join(catalog(chain, exhibits)))
        return 0
    stage = chain.stage(options.room)
    here = [fault for fault in exhibits if fault.stage == stage.key]
    if not here:
        rooms = ", ".join(dict.fromkeys(fault.stage for fault in exhibits))
        raise ChainError(f"stage {stage.number} has no room; there are: {rooms}")
    file = chain.root / "exercises" / "museum" / f"{stage.key}.py"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        cached = ", enable_prefix_caching=True" if stage.text("prefix_cache.py") else ""
        file.write_text(START.format(number=stage.number, options=cached), encoding="utf-8")
        print("\n".join(room(stage, here)))
        print(f"\nexercises/museum/{stage.key}.py is ready: write tests into it.")
        print(f"Do they find a fault?  make museum STAGE={stage.number}")
        return 0
    return judge(stage, here, file.read_text(encoding="utf-8"))


def catalog(chain: Chain, exhibits: Sequence[Fault]) -> list[str]:
    """Return the lines of all rooms."""
    lines = []
    for stage in chain.stages:
        if here := [fault for fault in exhibits if fault.stage == stage.key]:
            lines += [*room(stage, here), f"  Enter it: make museum STAGE={stage.number}", ""]
    return lines[:-1]


def room(stage: Stage, here: Sequence[Fault]) -> list[str]:
    """Return a room's lines: what its engines got wrong."""
    lines = [f"The room of {stage.name}:"]
    wrapper = textwrap.TextWrapper(110, initial_indent="  ", subsequent_indent="    ")
    for fault in here:
        lines += ["", *wrapper.wrap(f"{fault.name}, {fault.project}: {fault.was}"), f"    {address(fault.threads[0])}"]
    return lines


def called(name: str, exhibits: Sequence[Fault]) -> Fault:
    """Return the exhibit with that name. Raise ChainError if there is none."""
    for fault in exhibits:
        if fault.name == name:
            return fault
    raise ChainError(f"there is no exhibit {name!r}; there are: {', '.join(each.name for each in exhibits)}")


def planted(stage: Stage, fault: Fault) -> list[str]:
    """Return a fault as a diff, and what is different from the project's own."""
    lines = textwrap.wrap(fault.here, 110)
    for file, text in fault.plant(stage).items():
        diff = difflib.unified_diff(stage.text(file).splitlines(), text.splitlines(), file, file, lineterm="")
        lines += ["", *diff]
    return lines


def judge(stage: Stage, here: Sequence[Fault], tests: str) -> int:
    """Print which faults the tests find. Return the exit status."""
    reports = visit(stage, here, tests)
    if broken := [each for each in reports[HEALTHY] if each.is_red]:
        print(f"On stage {stage.number} itself, all tests must be green. The first red one:\n")
        print("\n".join(broken[0].lines()))
        return 1
    if not reports[HEALTHY]:
        raise ChainError(f"exercises/museum/{stage.key}.py has no test")
    print(f"Stage {stage.number} itself is green (tests: {len(reports[HEALTHY])}).")
    found = {fault: red(reports[fault.version]) for fault in here}
    for fault, names in found.items():
        print(f"  {fault.name}, {fault.project}: {f'found by {names[0]}' if names else 'not found'}")
    missing = [fault for fault in here if not found[fault]]
    if missing:
        print(f'\nNext: {missing[0].name}. A hint: make museum ARGS="--hint {missing[0].name}"')
    else:
        print('\nNothing is left to find in this room. make museum ARGS="--reveal NAME" shows a fault.')
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
