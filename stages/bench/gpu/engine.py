"""Parts 1 and 6 to 9: the tests marked gpu, and benchmarks of stages.bench, each in a process with its own memory."""

import json
import re
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nanovllm.bench.report import last_line
from stages.bench.gpu.common import PartReport, Row, Setup, note_missing, run

ROOT = Path(__file__).resolve().parents[3]
MARKED = re.compile(r"pytest\.mark\.gpu\b|^def test_\w+\(.*\bdevice\b", re.MULTILINE)
OUTCOME = re.compile(r"^(?:\[gw\d+\] \[ *\d+%\] )?(?:\S+::.* )?(PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b.*", re.MULTILINE)
KERNELS, BENCH = ROOT / "nanovllm" / "tests" / "gpu", ROOT / "tests" / "bench"
PAGED = [BENCH / "test_paged_kernels.py", BENCH / "test_triton_kernel.py"]
NEEDED = ("triton", "transformers", "click", "tqdm", "sentencepiece", "tokenizers", "safetensors", "jinja2")
WORKERS = 8  # of pytest-xdist
COMMAND_SECONDS = 280.0  # so that one that is stuck leaves time for others
SMALL = "--kv-cache-tokens 32768 --kv-offloading-tokens 0"  # a peer's weights need room, too
LARGE = "--kv-cache-tokens 98304 --kv-offloading-tokens 0 --max-num-batched-tokens 32768"  # 256 prompts in one step
DECODE = "race --rounds 3 --max-num-seqs 256"
TRY = "--attention-backend torch --kv-cache-tokens 512 --offload-policy load"
FULL = {  # our own numbers come before those of peers, since a part ends when its time is over
    6: [
        f"{DECODE} --shape tinyllama-1.1b --jobs 1,8,64 --no-transformers {SMALL}",
        f"{DECODE} --shape llama-2-7b --jobs 1,8 --no-transformers {SMALL}",
        f"{DECODE} --shape tinyllama-1.1b --jobs 256 --no-transformers {LARGE}",
        f"{DECODE} --shape tinyllama-1.1b --jobs 1,8 {SMALL}",
        f"{DECODE} --shape llama-2-7b --jobs 1 {SMALL}",
    ],
    7: ["published --kv-offloading-tokens 0 --no-peer", "published --kv-offloading-tokens 0 --peer-seconds 150"],
    8: ["paged --contexts 1024,8192", "paged --contexts 32768"],
    9: [f"launches {SMALL} --shape tinyllama-1.1b", f"launches {SMALL} --shape qwen3-0.6b --batch-size 64"],
}
TINY = {
    6: [f"race --jobs 1 --no-transformers --rounds 1 {TRY}"],
    7: [f"published --model models/storyteller --no-peer --num-requests 2 --min-len 4 --max-len 8 {TRY}"],
    8: ["paged --shape smollm2-135m --batch-sizes 1 --contexts 32 --block-sizes 16 --layers 1 --rounds 1"],
    9: [f"launches --input-len 4 --rounds 1 {TRY}"],
}


def run_benches(number: int, setup: Setup, report: PartReport) -> None:
    """Run the commands of a part."""
    if "click" not in note_missing(report, NEEDED):
        for command in setup.size(FULL, TINY)[number]:
            if f"python -m stages.bench {command}" not in report.results["tables"]:
                run_bench(setup, report, command)


def run_bench(setup: Setup, report: PartReport, command: str) -> None:
    """Run a command, and add its table, with a row per number and a column per engine."""
    file = (setup.out / "bench.json").resolve()
    options = ["--device", str(setup.device), "--json", str(file)]
    status, output = run_python(setup, ["-m", "stages.bench", *command.split(), *options])
    rows: dict[str, Row] = {"failed": {"exit status": status, "last line": last_line(output)}}
    if status == 0:
        results = json.loads(file.read_text(encoding="utf-8"))
        report.results["notes"] += results["says"]
        columns: dict[str, dict[str, Any]] = results["measured"]
        names = dict.fromkeys(name for numbers in columns.values() for name in numbers)
        known = {"dtype": results["machine"].get("dtype"), "rounds": results["settings"].get("rounds")}
        rows = {name: dict.fromkeys(columns, value) for name, value in known.items() if value}
        rows |= {name: {each: numbers.get(name) for each, numbers in columns.items()} for name in names}
    file.unlink(missing_ok=True)
    report.add(f"python -m stages.bench {command}", rows)


def run_python(setup: Setup, arguments: list[str]) -> tuple[int, str]:
    """Run Python, until its time or the part's is over. Return its exit status and its output."""
    if setup.seconds_left < 0:
        return 1, "no time left"
    return run([sys.executable, *arguments], min(setup.seconds_left, COMMAND_SECONDS), cwd=ROOT)


def run_tests(setup: Setup, report: PartReport) -> None:
    """Run the tests of the GPU's kernels, then those marked gpu. The part's log has their tracebacks."""
    if "pytest" in note_missing(report, ("pytest", "triton", "transformers", "xdist")):
        return
    if not setup.is_cuda:
        report.note("There is no CUDA device: every test that needs one is skipped.")
    few = [KERNELS / "test_on_device.py", KERNELS / "test_sampling_kernels.py"]
    groups = {
        "Tests of the GPU's kernels": setup.size([KERNELS, *PAGED], few),
        "Tests marked gpu": ["-m", "gpu", *setup.size(gpu_tests(), gpu_tests()[-1:])],
    }
    options = ["-v", "-rN", "--tb=short", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    options += ["-n", str(WORKERS)] if setup.is_cuda and find_spec("xdist") else []
    for title, arguments in groups.items():
        status, output = run_python(setup, ["-m", "pytest", *options, *map(str, arguments)])
        outcomes = [(match[1].lower(), match[0]) for match in OUTCOME.finditer(output)]
        counts = {"exit status": status, **Counter(outcome for outcome, _ in outcomes)}
        bad = {line: {"outcome": outcome} for outcome, line in outcomes if outcome in ("failed", "error")}
        report.add(title, {"all": counts, **bad})


def gpu_tests() -> list[Path]:
    """Return the files that have a test for a GPU, without those that a branch has from its base.

    Others may import packages that are not installed.
    """
    folders = [ROOT / "tests", *sorted((ROOT / "stages").glob("s[0-9]*/tests"))]
    files = [path for folder in folders for path in sorted(folder.glob("test_*.py"))]
    known = {(path.name, path.read_bytes()) for path in files}
    of_branches = sorted((ROOT / "stages").glob("more_*/tests/test_*.py"))
    files += [path for path in of_branches if (path.name, path.read_bytes()) not in known]
    return [path for path in files if MARKED.search(path.read_text(encoding="utf-8"))]
