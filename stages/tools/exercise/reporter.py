"""A plugin of pytest: tells how each test ended, as one line of JSON on a pipe, for checking.py to say in words.

A red test is told with what it expects in words (its name, its docstring, the message of its assert), what it found, in
a few short lines, and where that came from in the learner's code.
"""

import json
import os
import re
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

SECONDS = int(os.environ.get("SECONDS_FOR_A_TEST", "30"))  # what is half written may loop for ever
MAX_LINES, MAX_WIDTH = 4, 110  # of what was found: it is there to be read
OBJECT = re.compile(r"<(?:\w+\.)*(\w+) object at 0x\w+>")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tell-to", type=int, help="the file descriptor of a pipe")


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGALRM, _time_is_over)


def _time_is_over(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"the test did not end in {SECONDS} seconds: is there a loop that never ends?")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    signal.alarm(SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed or call.when == "call":
        told = {"test": item.nodeid, "outcome": report.outcome}
        _tell(item.config, told | (_in_words(item, call.excinfo) if report.failed and call.excinfo else {}))
    if call.excinfo and call.excinfo.errisinstance(TimeoutError):
        item.session.shouldstop = "a loop that never ends: the other tests would find it, too"
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        lines = [line.removeprefix("E").strip() for line in str(report.longrepr).splitlines() if line.startswith("E ")]
        _broken.append({"test": report.nodeid, "outcome": "broken", "found": lines[-1:] or ["it cannot be imported"]})


_broken: list[dict[str, Any]] = []


def pytest_collection_finish(session: pytest.Session) -> None:
    if torch := sys.modules.get("torch"):
        torch.set_printoptions(threshold=12, edgeitems=2, precision=4, linewidth=MAX_WIDTH)  # not pages of numbers
    for told in _broken:
        _tell(session.config, told)


def _tell(config: pytest.Config, told: dict[str, Any]) -> None:
    os.write(config.getoption("tell_to"), (json.dumps(told) + "\n").encode())


def _in_words(item: pytest.Item, error: pytest.ExceptionInfo) -> dict[str, Any]:
    message, found = _message_and_found(error)
    params = getattr(getattr(item, "callspec", None), "params", {})
    return {
        "docstring": (getattr(getattr(item, "obj", None), "__doc__", None) or "").strip(),
        "params": [f"{name} = {_clip(repr(value), 60)}" for name, value in params.items()],
        "message": message,
        "found": [_clip(OBJECT.sub(r"<\1>", line), MAX_WIDTH) for line in found[:MAX_LINES]],
        "is_open": error.errisinstance(NotImplementedError),
        **_places(item, error),
    }


def _message_and_found(error: pytest.ExceptionInfo) -> tuple[str, list[str]]:
    """The message of an assert, if it has one, and what was found; or what was raised."""
    text = str(error.value).strip()
    if error.errisinstance(AssertionError):
        message, mark, comparison = ("\n" + text).partition("\nassert ")
        lines = [line.strip() for line in f"{mark}{comparison}".splitlines() if line.strip()]
        return (message.strip(), lines) if lines else ("", message.strip().splitlines())  # of pytest.raises()
    if "DID NOT RAISE" in text:
        return "", ["no error was raised: " + text.removeprefix("DID NOT RAISE").strip() + " is asked for"]
    return "", [f"{error.typename}: {line}" if n == 0 else line for n, line in enumerate((text or "-").splitlines())]


def _places(item: pytest.Item, error: pytest.ExceptionInfo) -> dict[str, Any]:
    """The last lines of the learner's code and of the tests that were under way."""
    root, places = item.config.rootpath, {}
    for entry in error.traceback:
        path = Path(entry.path)
        if path.is_relative_to(root):
            file = path.relative_to(root)
            kind = "test_line" if file.parts[0] == "tests" else "code"
            source = " ".join(str(entry.statement).split())
            name = getattr(entry.frame.code.raw, "co_qualname", entry.name).partition(".<locals>")[0]
            places[kind] = {"file": file.as_posix(), "line": entry.lineno + 1, "name": name}
            places[kind]["source"] = _clip(source, MAX_WIDTH)
    return places


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 4] + " ..."
