"""What `make test` runs: each distinct test once, in a short form. `make test-all` runs everything.

    --part quick   leaves out copies of an earlier stage's tests and what is marked full: make test
    --part rest    what quick leaves out: .ci/run runs it after quick
    --part all     both: make test-all

A copy is left out only where the test that it is a copy of is in the same run (tests/copies.py): `pytest stages/s7...`
runs all that it names. A test that has a long form marks it: pytest.param(1000, marks=pytest.mark.full).
"""

from pathlib import Path

import pytest

from tests.copies import Test, find_copies
from tests.helpers import ROOT, find_stages, folder_of

FOLDERS = [*map(folder_of, find_stages(ROOT)), ROOT / "nanovllm" / "core"]
LEFT_OUT = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "quick: each distinct test once, in its short form; rest: what quick leaves out; all: both"
    parser.addoption("--part", choices=["quick", "rest", "all"], default="quick", help=help)


def pytest_report_header(config: pytest.Config) -> str:
    part = config.getoption("part")
    more = {"quick": "; make test-all runs the copies and the long ones too", "rest": ", after quick", "all": ""}
    return f"part: {part}{more[part]}"


def as_test(item: pytest.Item) -> Test:
    """Of an item with a node id like stages/s1_.../tests/test_a.py::TestB::test_c[3]."""
    is_function = isinstance(item, pytest.Function)
    return Test(item.path, item.nodeid.split("::")[1].split("[")[0] if is_function else "", item.nodeid.split("::", 1)[1])


@pytest.hookimpl(trylast=True)  # after -k and -m: of two equal tests, one that is left over runs
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    copies = find_copies([as_test(item) for item in items], FOLDERS)
    reasons = ["copies" if i in copies else "long" if item.get_closest_marker("full") else "" for i, item in enumerate(items)]
    part = config.getoption("part")
    runs = [part == "all" or bool(reason) == (part == "rest") for reason in reasons]
    config.stash[LEFT_OUT] = {
        kind: sum(reason == kind and not run for reason, run in zip(reasons, runs, strict=True)) for kind in ("copies", "long")
    }
    config.hook.pytest_deselected(items=[item for item, run in zip(items, runs, strict=True) if not run])
    items[:] = [item for item, run in zip(items, runs, strict=True) if run]


# With pytest-xdist the workers collect, and the terminal is the controller's: the counts travel.


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    if left_out := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[LEFT_OUT] = left_out


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left_out = config.stash.get(LEFT_OUT, {})
    if any(left_out.values()):
        copies, long = left_out["copies"], left_out["long"]
        told = f"left out: {copies:,} copies of an earlier stage's tests, and {long:,} long ones; make test-all runs all"
        terminalreporter.write_line(told)
