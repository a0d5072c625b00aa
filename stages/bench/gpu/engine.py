"""Parts 1 and 6 to 9: the tests marked gpu, and commands of `nanovllm bench`, each in a process with its own memory."""

import json
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.bench.report import shown
from stages.bench.gpu.common import PartReport, Row, Setup

ROOT = Path(__file__).resolve().parents[3]
MARKED = re.compile(r"pytest\.mark\.gpu\b|^def test_\w+\(.*\bdevice\b", re.MULTILINE)
KERNELS = ROOT / "nanovllm" / "tests" / "gpu"
COUNTS = ("tests", "failures", "errors", "skipped")


class Bench(NamedTuple):
    """A command of `nanovllm bench`."""

    title: str
    command: str


SMALL = "--kv-cache-tokens 32768 --kv-offloading-tokens 0"  # a peer's weights need room, too
LARGE = "--kv-cache-tokens 98304 --kv-offloading-tokens 0 --max-num-batched-tokens 32768"  # 256 prompts in one step
DECODE = "peers --rounds 3 --max-num-seqs 256"
TRY = "--rounds 1 --attention-backend torch --kv-cache-tokens 512 --offload-policy load"
FULL = {  # the most reliable ones come first, since a stopped part keeps its results so far
    6: [
        Bench("Decode, 1.1B, bfloat16", f"{DECODE} --shape tinyllama-1.1b --jobs 1,8,64 --no-transformers {SMALL}"),
        Bench("Decode, 7B, bfloat16", f"{DECODE} --shape llama-2-7b --jobs 1,8 --no-transformers {SMALL}"),
        Bench("Decode, 1.1B, 256", f"{DECODE} --shape tinyllama-1.1b --jobs 256 --no-transformers {LARGE}"),
        Bench("Decode beside transformers, 1.1B", f"{DECODE} --shape tinyllama-1.1b --jobs 1,8 {SMALL}"),
        Bench("Decode beside transformers, 7B", f"{DECODE} --shape llama-2-7b --jobs 1 {SMALL}"),
    ],
    7: [Bench("nano-vllm's workload, Qwen3-0.6B shapes", "published --kv-offloading-tokens 0")],
    8: [Bench("Paged and contiguous, shapes of Llama 3.1 8B", "paged")],
    9: [
        Bench("A step of one sequence, 1.1B", f"launches {SMALL} --shape tinyllama-1.1b"),
        Bench("A step of 64 sequences, Qwen3-0.6B", f"launches {SMALL} --shape qwen3-0.6b --batch-size 64"),
    ],
}
PAGED = "paged --shape smollm2-135m --batch-sizes 1 --contexts 32 --block-sizes 16 --layers 1 --rounds 1"
PUBLISHED = "published --model models/storyteller --no-peer --num-requests 2 --min-len 4 --max-len 8"
TINY = {
    6: [Bench("Decode", f"peers --jobs 1 --no-transformers {TRY}")],
    7: [Bench("nano-vllm's workload", f"{PUBLISHED} {TRY.removeprefix('--rounds 1 ')}")],
    8: [Bench("Paged and contiguous", PAGED)],
    9: [Bench("A step of one sequence", f"launches --input-len 4 {TRY}")],
}


def run_benches(number: int, setup: Setup, report: PartReport) -> None:
    """Run the commands of a part."""
    for bench in setup.size(FULL, TINY)[number]:
        if report.has_time(bench.title):
            run_bench(setup, report, bench)


def run_bench(setup: Setup, report: PartReport, bench: Bench) -> None:
    """Run a command, and report its table or its error."""
    file = (setup.out / "bench.json").resolve()
    setup.out.mkdir(parents=True, exist_ok=True)
    report.note(f"`nanovllm bench {bench.command}`")
    command = ["-m", "nanovllm", "bench", *bench.command.split(), "--device", str(setup.device), "--json", str(file)]
    _, error = run(setup, command)
    if error:
        report.note(f"{bench.title}: {error}")
        return
    result = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    report.table(f"{bench.title}; {result['machine'].get('with', 'all ways')}", rows_of(result["measured"]))
    for line in result["says"]:
        report.note(line)


def run(setup: Setup, arguments: Sequence[str]) -> tuple[str, str | None]:
    """Run Python until the part's time is over. Return its output, and what went wrong."""
    seconds = max(1.0, setup.deadline - time.perf_counter())
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as late:  # its output is bytes even with text=True
        return "", f"stopped after {seconds:.0f} seconds: {last_line((late.stderr or b'').decode(errors='replace'))}"
    return done.stdout, f"exit status {done.returncode}: {last_line(done.stderr)}" if done.returncode else None


def last_line(text: str) -> str:
    """Return the last line that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def rows_of(measured: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return a row per number, with a column for each engine.

    >>> rows_of({"a": {"ms": 2.0}, "b": {"ms": {"median": 3.0, "least": 1.0, "largest": 4.0}}})
    [{'number': 'ms', 'a': 2.0, 'b': '3 / 1 / 4'}]
    """
    rows: dict[str, dict[str, Any]] = {}
    for column, numbers in measured.items():
        for name, value in numbers.items():
            rows.setdefault(name, {"number": name})[column] = shown(value) if isinstance(value, dict) else value
    return [*rows.values()]


# ---- tests


def run_tests(setup: Setup, report: PartReport) -> None:
    """Run the tests of the GPU's kernels, and those marked gpu."""
    if not setup.is_cuda:
        report.note("There is no CUDA device: every test that needs one is skipped.")
    setup.out.mkdir(parents=True, exist_ok=True)
    groups = {
        "Tests of the GPU's kernels": [setup.size(KERNELS, KERNELS / "test_on_device.py")],
        "Tests marked gpu": ["-m", "gpu", *setup.size(gpu_tests(), gpu_tests()[-1:])],
    }
    for number, (title, arguments) in enumerate(groups.items()):
        xml = (setup.out / f"tests{number}.xml").resolve()
        xml.unlink(missing_ok=True)
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={xml}"]
        output, error = run(setup, ["-m", "pytest", *options, *map(str, arguments)])
        report.note("```text\n" + "\n".join(output.splitlines()[-40:]) + "\n```" if output else f"{title}: {error}")
        if xml.exists():
            suites = ET.parse(xml).getroot().iter("testsuite")
            report.table(title, [{name: int(suite.get(name, 0)) for name in COUNTS} for suite in suites])


def gpu_tests() -> list[Path]:
    """Return the files that have a test for a GPU. Others may import packages that are not installed."""
    folders = [ROOT / "tests", *sorted((ROOT / "stages").glob("s[0-9]*/tests"))]
    files = [path for folder in folders for path in sorted(folder.glob("test_*.py"))]
    return [path for path in files if MARKED.search(path.read_text(encoding="utf-8"))]
