"""Run a stage's tests in a process of pytest, and read what reporter.py says of each."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..chain.model import ChainError, Stage
from .folder import copy_stage
from .report import Report

FLAGS = ("-q", "--tb=short", "--rootdir=.", "--confcutdir=.", "-c", os.devnull, "-p", "no:cacheprovider")
SETTINGS = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
SETTINGS |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # a stage needs no plugin
TOOLS = Path(__file__).resolve().parents[3]


class Version(NamedTuple):
    """A stage with different texts in some files, and the tests to run on it."""

    name: str  # an identifier
    texts: dict[str, str]  # by file
    tests: tuple[str, ...]  # node ids relative to the stage


def run_versions(stage: Stage, versions: Iterable[Version]) -> dict[str, list[Report]]:
    """Run the tests of all versions in one process. Return the reports of each version."""
    with tempfile.TemporaryDirectory() as temporary:
        tests = []
        for version in versions:
            copy_stage(stage, Path(temporary, version.name), version.texts)
            tests += [f"{version.name}/{test}" for test in dict.fromkeys(version.tests)]
        result: dict[str, list[Report]] = {version.name: [] for version in versions}
        for report in run_tests(Path(temporary), tests, "--continue-on-collection-errors"):
            name, _, test = report.test.partition("/")
            result[name].append(replace(report, test=test))
    return result


def run_tests(folder: Path, tests: Iterable[str], *flags: str) -> list[Report]:
    """Run tests in `folder`, and return a report of each. Raise ChainError if pytest did not run."""
    command = [sys.executable, "-m", "pytest", *FLAGS, *flags, "-p", "stages.tools.exercise.reporter", *tests]
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, "--report-to", str(write_end)],
            cwd=folder, env=environment(TOOLS), pass_fds=[write_end], stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        os.close(write_end)
        reports = list(_read_reports(read_end))
        status = process.wait()
        output.seek(0)
        if status not in (0, 1) and not reports:
            raise ChainError(f"the tests could not be run: {_last_error(output.read())}")
    return reports


def environment(root: Path) -> dict[str, str]:
    """Return the environment of a program that imports packages below `root`."""
    return os.environ | SETTINGS | {"PYTHONPATH": str(root)}


def _read_reports(read_end: int) -> Iterator[Report]:
    """Yield the report of each test; print a count on a terminal."""
    count = 0
    with open(read_end, encoding="utf-8") as lines:
        for count, line in enumerate(lines, 1):
            if sys.stdout.isatty():
                print(f"\r  {count} tests have run", end="", flush=True)
            yield Report.from_json(line)
    if count and sys.stdout.isatty():
        print("\r" + " " * 40 + "\r", end="")


def _last_error(output: str) -> str:
    if "No module named pytest" in output:
        return f"{sys.executable} has no pytest. Without PY=, make takes .venv, which has it"
    lines = [line.removeprefix("E").strip() for line in output.splitlines() if line.startswith("E ") or "rror" in line]
    return lines[-1] if lines else "pytest printed nothing"
