"""A warm process that tests one mutant after another: `python -m tests.mutants.worker`, in a copy of the repository.

It imports what all tests need, torch above all, and nothing that is mutated. For each job it forks, and the child runs
pytest: seconds of imports are paid once. A job is a line of JSON on stdin, its result a line on stdout.

A job without a mutation is a baseline: it also says which lines of the mutated files each test reaches, so that a
mutant is tested by tests that can see it.
"""

import ctypes
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

LIBRARIES = ("torch", "numpy", "transformers", "safetensors.torch", "tokenizers", "sentencepiece", "jinja2", "pydantic")
LIBRARIES += ("click", "tqdm", "numba", "hypothesis.stateful", "starlette.applications", "uvicorn", "h11", "httpx")
LIBRARIES += ("prometheus_client", "openai", "llguidance", "gguf", "asyncio", "multiprocessing", "anyio.pytest_plugin")
LIBC = ctypes.CDLL(None)
MEMORY = 6 << 30  # bytes of the child and its own processes together
CALLS = 300  # after so many calls without a new line, the test is taken to reach no other line of a function
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Plugin:
    """Runs the chosen tests, and reports the first failure, and times and lines if it is a baseline."""

    def __init__(self, tests: list[str] | None, traced: dict[str, str]) -> None:
        self.tests = tests
        self.report: dict[str, Any] = {"failures": [], "ran": 0, "seconds": {}, "lines": {}, "error": ""}
        self._traced = traced  # file by absolute path
        self._lines: set[tuple[str, int]] = set()
        self._calls: dict[Any, int] = {}  # of each function, since the last line that the test had not reached before

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.tests is not None:
            order = {test: index for index, test in enumerate(self.tests)}
            items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:
            self.report["ran"] += 1
        times = self.report["seconds"]
        times[report.nodeid] = times.get(report.nodeid, 0.0) + (report.duration if report.when == "call" else 0.0)
        if report.failed:
            self.report["failures"].append(report.nodeid)
            self.report["error"] += str(report.longrepr)[-1500:]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.report["failures"].append(report.nodeid)
            self.report["error"] += str(report.longrepr)[-1500:]

    # Lines that a test reaches. Those of imports and fixtures count for all tests of the run.

    def start_trace(self) -> None:
        if self._traced:
            threading.settrace(self._trace)
            sys.settrace(self._trace)

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        code = frame.f_code
        file = self._traced.get(code.co_filename)
        if file is None:
            return None
        lines, calls = self._lines, self._calls
        lines.add((file, frame.f_lineno))
        calls[code] = calls.get(code, 0) + 1
        if calls[code] > CALLS:
            return None

        def trace_line(frame: Any, event: str, argument: Any) -> Any:
            line = (file, frame.f_lineno)
            if line not in lines:
                lines.add(line)
                calls[code] = 0
            return trace_line

        return trace_line

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        self._take("")
        self.start_trace()  # a test may have replaced it
        yield
        self._take(item.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._take("")
        sys.settrace(None)

    def _take(self, test: str) -> None:
        for file, line in list(self._lines):
            self.report["lines"].setdefault(file, {}).setdefault(str(line), {}).setdefault(test)
        self._lines.clear()
        self._calls.clear()


def load_profile() -> None:
    """Have hypothesis find a failing example, and not look for a smaller one."""
    from hypothesis import HealthCheck, Phase, settings

    phases = (Phase.explicit, Phase.generate)
    checks = list(HealthCheck)
    settings.register_profile(
        "mutants", phases=phases, database=None, derandomize=True, deadline=None, suppress_health_check=checks
    )
    settings.load_profile("mutants")


def run_tests(job: dict[str, Any], folder: Path) -> None:
    """Run pytest in the child, and write its report to `folder`."""
    os.setsid()
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    sys.dont_write_bytecode = job["text"] is not None
    os.environ["TMPDIR"] = str(folder)
    if job["text"] is not None:
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    tempfile.tempdir = None
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    load_profile()
    root = Path.cwd()
    plugin = Plugin(job.get("tests"), {str(root / file): file for file in job.get("trace", ())})
    plugin.start_trace()
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:xdist", "--hypothesis-seed=0"]
    arguments += ["--tb=short"] if job["text"] is None else ["--tb=short", "-x"]
    status = pytest.main([*arguments, f"--basetemp={folder}/pytest", *job["files"]], plugins=[plugin])
    report = plugin.report | {"status": int(status)}
    report["lines"] = {
        file: {line: list(tests) for line, tests in each.items()} for file, each in report["lines"].items()
    }
    (folder / "report.tmp").write_text(json.dumps(report))
    (folder / "report.tmp").rename(folder / "report")


def descendants() -> dict[int, int]:
    """Return the bytes in memory of each process below this one. Orphans are among them: this is their subreaper."""
    children: dict[int, list[int]] = {}
    memory: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            fields = path.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
            memory[int(path.parent.name)] = int(fields[21]) * resource.getpagesize()
    below, todo = {}, [os.getpid()]
    while todo:
        for pid in children.get(todo.pop(), ()):
            below[pid] = memory[pid]
            todo.append(pid)
    return below


def end_descendants() -> None:
    while pids := descendants():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Mutate the file, run its tests in a child, restore the file, and return the report."""
    folder = Path(tempfile.mkdtemp(prefix="mutant-"))
    path, original, times = None, b"", (0, 0)
    if job["text"] is not None:
        path = Path(job["file"])
        original, stat = path.read_bytes(), path.stat()
        times = (stat.st_atime_ns, stat.st_mtime_ns)
        path.write_text(job["text"], encoding="utf-8")
        os.utime(path, ns=(times[0], times[1] + 3600 * 10**9))  # Python must not take the old bytecode
    try:
        started = time.monotonic()
        if (child := os.fork()) == 0:
            try:
                run_tests(job, folder)
            except BaseException as error:
                print(repr(error), file=sys.stderr)
            finally:
                os._exit(0)
        ended = ""
        while not ended:
            if os.waitpid(child, os.WNOHANG)[0]:
                ended = "exit"
            elif time.monotonic() - started > job["timeout"]:
                ended = "timeout"
            elif sum(descendants().values()) > MEMORY:
                ended = "memory"
            else:
                time.sleep(0.05)
        seconds = time.monotonic() - started
        end_descendants()
        report = json.loads(text.read_text()) if (text := folder / "report").exists() else None
        result = {"ended": ended, "seconds": seconds, "report": report}
        if ended == "exit" and (report is None or report["status"]):
            result["output"] = (folder / "output").read_text(errors="replace")[-3000:] if report is None else ""
        return result
    finally:
        if path:
            path.write_bytes(original)
            os.utime(path, ns=times)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # no worker outlives the main process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends this one
    for library in LIBRARIES:
        with suppress(ImportError):
            importlib.import_module(library)
    import torch

    torch.set_num_threads(1)
    results = os.fdopen(os.dup(1), "w")
    while line := sys.stdin.readline():
        results.write(json.dumps(run_job(json.loads(line))) + "\n")
        results.flush()


if __name__ == "__main__":
    main()
