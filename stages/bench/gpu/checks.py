"""Part 1: the tests of the GPU's kernels and those marked gpu, in a process each. A copied test runs once."""

import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

from stages.bench.gpu.common import Report, Setup

ROOT = Path(__file__).resolve().parents[3]
MARKED = re.compile(r"pytest\.mark\.gpu\b|^def test_\w+\(.*\bdevice\b", re.MULTILINE)
KERNELS = ROOT / "nanovllm" / "tests" / "gpu"
COUNTS = ("tests", "failures", "errors", "skipped")


def measure(setup: Setup, report: Report) -> None:
    if not setup.is_cuda:
        report.note("There is no CUDA device: every test that needs one is skipped.")
    files = setup.size(gpu_tests(), gpu_tests()[-1:])
    run(setup, report, "Tests of the GPU's kernels", [*setup.size([KERNELS], [KERNELS / "test_activation.py"])])
    run(setup, report, "Tests marked gpu", ["-m", "gpu", *files])


def run(setup: Setup, report: Report, title: str, arguments: list[str | Path]) -> None:
    setup.out.mkdir(parents=True, exist_ok=True)
    xml, seconds = (setup.out / "tests.xml").resolve(), max(1.0, setup.deadline - time.perf_counter())
    xml.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={xml}", *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, timeout=seconds, capture_output=True, text=True)
        report.note("```text\n" + "\n".join(done.stdout.splitlines()[-40:]) + "\n```")
    except subprocess.TimeoutExpired:
        report.note(f"Stopped after {seconds:.0f} seconds: the tests took too long.")
    if xml.exists():
        suites = ET.parse(xml).getroot().iter("testsuite")
        report.table(title, [{name: int(suite.get(name, 0)) for name in COUNTS} for suite in suites])


def gpu_tests() -> list[Path]:
    """The files that have a test for a GPU. No other is imported: it may need what is not installed."""
    folders = [ROOT / "tests", *sorted((ROOT / "stages").glob("s[0-9]*/tests"))]
    files = [path for folder in folders for path in sorted(folder.glob("test_*.py"))]
    return [path for path in files if MARKED.search(path.read_text(encoding="utf-8"))]
