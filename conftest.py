"""Choose the tests of a run: `make test` runs each distinct test once, in a short form, and `make test-all` all tests.

    --part quick   leaves out copies of an earlier stage's tests, and tests marked full: make test
    --part rest    the tests that quick leaves out: .ci/run runs them after quick
    --part nightly the longest forms, marked nightly: .ci/nightly runs them
    --part all     all of them: make test-all

A copy is left out only if its original is in the same run (tests/duplicate_tests.py), so `pytest stages/s7...` runs all
tests of that stage. Test files that a branch has byte for byte from its base run at night. Mark a test's long form with
pytest.param(1000, marks=pytest.mark.full).
"""

import gc
import os
import re
import signal
from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.duplicate_tests import Case, find_copies
from tests.helpers import ROOT, find_bases, find_stages, folder_of

STAGES = [folder_of(stage) for stage in find_stages(ROOT)]
BASES = {folder_of(branch): folder_of(base) for branch, base in find_bases(ROOT).items()}
COSTLY = ("test_histories.py",)  # long histories: quick runs only the last stage's
COMPILING = {"compiled", "with_kernels"}  # fixtures that compile all CPU kernels, unless they are cached
os.environ.setdefault("NUMBA_NUM_THREADS", "1")  # of the branch more_kernel: small models lose time with more
LEFT_OUT = pytest.StashKey[Counter[str]]()  # the number of tests by kind


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "quick: each distinct test once, in its short form; rest: copies and long forms; nightly: the longest; all"
    parser.addoption("--part", choices=["quick", "rest", "nightly", "all"], default="quick", help=help)


def pytest_configure(config: pytest.Config) -> None:
    """Restore Ctrl-C, which shells disable for background jobs: some tests press it, and would wait forever.

    Collect no garbage until the tests are collected: there is none, and each collection looks at all objects.
    """
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header(config: pytest.Config) -> str:
    part = config.getoption("part")
    meaning = {
        "quick": "each distinct test once, in its short form; make test-all, or --part all, runs everything",
        "rest": "copies of an earlier stage's tests, and long forms",
        "nightly": "the longest forms",
        "all": "everything",
    }
    return f"part {part}: {meaning[part]}"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Skip the branch that needs numba if it is missing, and the doctests of modules that need triton or ray.

    The last two have environments of their own.
    """
    if collection_path.name == "more_kernel" and collection_path.is_dir():
        return True if find_spec("numba") is None else None
    owners = {("backends", "gpu"): "triton", ("stages", "more_kernel"): "triton", ("nanovllm", "cluster"): "ray"}
    library = owners.get(collection_path.parent.parts[-2:]) if collection_path.suffix == ".py" else None
    if library is None or find_spec(library) is not None:
        return None
    return True if re.search(rf"^(import|from) {library}\b", collection_path.read_text(), re.MULTILINE) else None


def as_case(item: pytest.Item) -> Case:
    """Return the case of an item with a node id like stages/s1_.../tests/test_a.py::TestB::test_c[3]."""
    inside = item.nodeid.split("::", 1)[1]
    return Case(item.path, re.split(r"::|\[", inside)[0] if isinstance(item, pytest.Function) else "", inside)


@pytest.hookimpl(trylast=True)  # after -k and -m: if they deselect an original, its copy runs
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, copies = config.getoption("part"), find_copies([as_case(item) for item in items], STAGES)
    last = costly_at_the_end({item.path for item in items})
    kinds = [
        "copies" if i in copies else "nightly" if is_from_base(item.path) else length(item, last)
        for i, item in enumerate(items)
    ]
    kept = {"rest": {"copies", "long"}, "all": {"quick", "copies", "long", "nightly"}}.get(part, {part})
    config.stash[LEFT_OUT] = Counter(kind for kind in kinds if kind not in kept)
    config.hook.pytest_deselected(items=[item for item, kind in zip(items, kinds, strict=True) if kind not in kept])
    items[:] = [item for item, kind in zip(items, kinds, strict=True) if kind in kept]


@cache
def is_from_base(path: Path) -> bool:
    """Return True if the file is in a branch, and byte for byte that of its base."""
    originals = [base / path.relative_to(branch) for branch, base in BASES.items() if path.is_relative_to(branch)]
    return any(original.exists() and original.read_bytes() == path.read_bytes() for original in originals)


def pytest_collection_finish() -> None:
    """Take what exists now, a million objects, out of the tests' garbage collections: each would look at all of it."""
    gc.collect()
    gc.freeze()
    gc.enable()


def costly_at_the_end(paths: set[Path]) -> set[Path]:
    """Return the last stage's costly files that are in this run."""
    return {STAGES[-1] / "tests" / name for name in COSTLY} & paths


def length(item: pytest.Item, last: set[Path]) -> str:
    """Return "nightly", "long" or "quick".

    Long are tests marked full, those that compile all CPU kernels, those marked `newest` of stages 1 and 4, and an
    earlier stage's costly files. Those marked `newest` of the stages between run at night.
    """
    stage = getattr(item, "callspec", None) and item.callspec.params.get("stage")
    is_earlier = stage in [f"stages.{folder.name}" for folder in STAGES[:-1]] and item.get_closest_marker("newest")
    is_costly = item.path.parent.parent in STAGES[:-1] and item.path.name in {path.name for path in last}
    is_middle = is_earlier and stage not in (f"stages.{STAGES[0].name}", f"stages.{STAGES[3].name}")
    is_compiling = not COMPILING.isdisjoint(getattr(item, "fixturenames", ()))
    is_long = item.get_closest_marker("full") or is_earlier or is_costly or is_compiling
    return "nightly" if item.get_closest_marker("nightly") or is_middle else "long" if is_long else "quick"


# With pytest-xdist, the workers collect tests and send their counts to the controller, which prints them.


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash.get(LEFT_OUT, {}))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if left_out := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[LEFT_OUT] = Counter(left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left_out = config.stash.get(LEFT_OUT, Counter())
    if config.getoption("part") == "quick" and left_out:
        copies, long = left_out["copies"], left_out["long"] + left_out["nightly"]
        counts = f"left out: {copies:,} copies of an earlier stage's tests, {long:,} long"
        terminalreporter.write_line(f"{counts}. make test-all, or --part all, runs them.")
    if any("no Chromium" in str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_line("left out: the page's tests, because there is no Chromium.")
