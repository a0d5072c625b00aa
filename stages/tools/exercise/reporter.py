"""A pytest plugin that reports each test's outcome as a line of JSON on a pipe.

The report of a red test has the expectation in words (its name, its docstring, the message of its assert), a few short
lines of the result, and the line of the learner's code that it came from.
"""

import os
import re
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from .report import Place, Report

SECONDS = int(os.environ.get("SECONDS_FOR_A_TEST", "60"))  # half-written code may loop forever
MAX_LINES, MAX_WIDTH = 4, 110  # of a result: people read it
OBJECT = re.compile(r"<(?:\w+\.)*(\w+) object at 0x\w+>")
BYTES = re.compile(  # raw bytes of more than four
    r"""\bb(['"])(?=(?:(?!\1).)*\\x)((?:\\x..|\\.|(?!\1).){4})(?:\\x..|\\.|(?!\1).)+\1"""
)
OF_PYTEST = ("Use -v ", "+  where ", "+  and ")  # lines about pytest, and not about the code


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report-to", type=int, help="the file descriptor of a pipe")


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGALRM, _time_out)


def _time_out(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"the test did not finish within {SECONDS} seconds: is there an infinite loop?")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the rest of a stage that looped forever: its other tests would loop too."""
    if _stage_folder(item) in _endless:
        pytest.skip("an earlier test of this stage did not finish")  # sends no report; fixtures are torn down in order


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    signal.alarm(SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    outcome = yield
    if outcome.failed and call.excinfo:
        _send(item.config, _in_words(item, call.excinfo))
    elif outcome.failed or call.when == "call":
        _send(item.config, Report(item.nodeid, outcome.outcome))
    if call.excinfo and call.excinfo.errisinstance(TimeoutError):
        _endless.add(_stage_folder(item))
    return outcome


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        lines = [line.removeprefix("E").strip() for line in str(report.longrepr).splitlines() if line.startswith("E ")]
        _broken.append(Report(report.nodeid, "broken", result=tuple(lines[-1:] or ["the import failed"])))


_broken: list[Report] = []
_endless: set[Path] = set()


def _stage_folder(item: pytest.Item) -> Path:
    """Return the folder that holds `tests`."""
    return next(folder.parent for folder in item.path.parents if folder.name == "tests")


def pytest_collection_finish(session: pytest.Session) -> None:
    if torch := sys.modules.get("torch"):
        torch.set_printoptions(threshold=12, edgeitems=2, precision=4, linewidth=MAX_WIDTH)  # not pages of numbers
    for report in _broken:
        _send(session.config, report)


def _send(config: pytest.Config, report: Report) -> None:
    os.write(config.getoption("report_to"), (report.to_json() + "\n").encode())


def _in_words(item: pytest.Item, error: pytest.ExceptionInfo[BaseException]) -> Report:
    message, result = _message_and_result(error)
    params = getattr(getattr(item, "callspec", None), "params", {})
    return Report(
        item.nodeid,
        "failed",
        docstring=(getattr(getattr(item, "obj", None), "__doc__", None) or "").strip(),
        params=tuple(f"{name} = {_clip(repr(value), 60)}" for name, value in params.items()),
        message=_shorten(message),
        result=tuple(_clip(_shorten(line), MAX_WIDTH) for line in result[:MAX_LINES]),
        is_open=error.errisinstance(NotImplementedError),
        **_places(item, error),
    )


def _message_and_result(error: pytest.ExceptionInfo[BaseException]) -> tuple[str, list[str]]:
    """Return the message of an assert, if it has one, and the values compared; or the error raised."""
    text = str(error.value).strip()
    if error.errisinstance(AssertionError):
        message, mark, comparison = ("\n" + text).partition("\nassert ")
        lines = [line.strip() for line in f"{mark}{comparison}".splitlines()]
        lines = [line for line in lines if line and not line.startswith(OF_PYTEST)]
        return (message.strip(), lines) if lines else ("", message.strip().splitlines())  # from pytest.raises()
    if "DID NOT RAISE" in text:
        return "", ["no error was raised; expected " + text.removeprefix("DID NOT RAISE").strip()]
    return "", [f"{error.typename}: {line}" if n == 0 else line for n, line in enumerate((text or "-").splitlines())]


def _places(item: pytest.Item, error: pytest.ExceptionInfo[BaseException]) -> dict[str, Any]:
    """Return the test's own last line that ran, and the calls of the learner's code, by field of Report."""
    root, test_line, code = _stage_folder(item), None, []
    for entry in error.traceback:
        path = Path(entry.path)
        if path.is_relative_to(root):
            file = path.relative_to(root)
            source = _clip(" ".join(str(entry.statement).split()), MAX_WIDTH)
            name = getattr(entry.frame.code.raw, "co_qualname", entry.name).partition(".<locals>")[0]
            place = Place(file.as_posix(), entry.lineno + 1, name, source)
            if file.parts[0] == "tests":
                test_line = test_line or place  # the outermost: then come its helpers
            else:
                code.append(place)
    return {"test_line": test_line, "calls": tuple(code)}


def _shorten(text: str) -> str:
    r"""Return a text without addresses of objects, and with the first four of many bytes.

    >>> print(_shorten(r"KeyError: b'\xdf\x01ab\x99\xaf', for b's <torch.Tensor object at 0x7f3>"))
    KeyError: b'\xdf\x01ab...', for b's <Tensor>
    """
    return BYTES.sub(r"b\1\2...\1", OBJECT.sub(r"<\1>", text))


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 4] + " ..."
