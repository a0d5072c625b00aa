"""Plant faults in the CPU kernels, and see whether the tests against their plain twins notice.

    make mutants ARGS=--kernels       all faults, in about ten minutes; writes the page's second table

A tool can't choose these faults: most random changes of a kernel don't compile, or read memory that isn't theirs.
Those in kernels.toml compile, stay in bounds, and compute something else. A fault counts as noticed if an assertion
fails. A test that doesn't end, or a process that dies, is an error of the list.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from tests.mutants.copies import copy_repository
from tests.mutants.report import insert

KERNELS, TESTS = "nanovllm/backends/cpu", "nanovllm/tests/cpu"
NOTICED, SURVIVED = "noticed", "survived"
PATIENCE = 600.0  # seconds, a guard: compilation takes most of a test's time


class Fault(NamedTuple):
    """A text of a kernel, and the fault that replaces it."""

    file: str
    fault: str
    before: str
    after: str
    test: str


def read_faults() -> list[Fault]:
    text = (Path(__file__).parent / "kernels.toml").read_text(encoding="utf-8")
    return [Fault(**each) for each in tomllib.loads(text)["faults"]]


def plant(fault: Fault, text: str) -> str:
    """Return the text with the fault. Raise ValueError unless `before` occurs exactly once."""
    if text.count(fault.before) != 1:
        raise ValueError(f"{fault.file} has {text.count(fault.before)} places for this fault: {fault.fault}")
    return text.replace(fault.before, fault.after)


def judge(status: int, output: str) -> tuple[str, str]:
    """Return what a test run says about a fault, and the test that noticed it."""
    if status == 0:
        return SURVIVED, ""
    failed = re.search(r"^FAILED \S+::(\S+).* - (?:AssertionError|assert)\b", output, re.MULTILINE)
    if status == 1 and failed:
        return NOTICED, failed[1]
    raise RuntimeError(f"no assertion failed, but pytest ended with {status}:\n{output[-2000:]}")


def run_test(folder: Path, test: str) -> tuple[int, str]:
    """Run a test in a copy of the repository, in its short and long forms."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["COLUMNS"] = "300"  # or pytest leaves out the error of a test with a long name
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rf", "--part", "all", "-m", "not nightly"]
    done = subprocess.run(
        [*command, f"{TESTS}/{test}"], cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    return done.returncode, done.stdout + done.stderr


def table(results: Iterable[tuple[Fault, str, str]]) -> str:
    """Return the page's second table."""
    rows = ["| file | fault | noticed by |", "|---|---|---|"]
    counts = {NOTICED: 0, SURVIVED: 0}
    for fault, status, by in results:
        counts[status] += 1
        rows.append(f"| {fault.file} | {fault.fault} | {f'`{by}`' if by else '**nothing**'} |")
    count = sum(counts.values())
    return f"{counts[NOTICED]} of {count} faults noticed.\n\n" + "\n".join(rows) + "\n"


def main(num_workers: int, page: Path) -> int:
    faults = read_faults()
    with tempfile.TemporaryDirectory(prefix="nanovllm-kernels-") as parent:
        folders: SimpleQueue[Path] = SimpleQueue()
        for index in range(num_workers):
            copy_repository(Path(parent) / str(index))
            folders.put(Path(parent) / str(index))

        def test(each: str | Fault) -> tuple[str, str]:
            folder, begin = folders.get(), time.monotonic()
            name = each if isinstance(each, str) else each.test
            path = folder / KERNELS / (each.file if isinstance(each, Fault) else "__init__.py")
            original = path.read_text(encoding="utf-8")
            try:
                if isinstance(each, Fault):
                    path.write_text(plant(each, original), encoding="utf-8")
                status, by = judge(*run_test(folder, name))
            finally:
                path.write_text(original, encoding="utf-8")
                folders.put(folder)
            seconds, label = time.monotonic() - begin, each.fault if isinstance(each, Fault) else f"no fault: {name}"
            print(f"{status:9} {seconds:5.1f} s  {label}  {by}", flush=True)
            return status, by

        with ThreadPoolExecutor(num_workers) as threads:
            if any(status != SURVIVED for status, _ in threads.map(test, dict.fromkeys(each.test for each in faults))):
                raise RuntimeError("a test fails without a fault")
            results = [(fault, *each) for fault, each in zip(faults, threads.map(test, faults), strict=True)]
    page.write_text(insert(page.read_text(encoding="utf-8"), "kernels", table(results)), encoding="utf-8")
    return sum(status == SURVIVED for _, status, _ in results)
