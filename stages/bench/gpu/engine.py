"""Parts 1 and 6 to 9: the tests marked gpu, and commands of `nanovllm bench`, each in a process with its own memory."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from nanovllm.bench.report import last_line
from stages.bench.gpu.common import PartReport, Setup

ROOT = Path(__file__).resolve().parents[3]
MARKED = re.compile(r"pytest\.mark\.gpu\b|^def test_\w+\(.*\bdevice\b", re.MULTILINE)
OUTCOMES = re.compile(r"(\d+) (passed|failed|skipped|deselected|errors?)\b")
KERNELS = ROOT / "nanovllm" / "tests" / "gpu"
SMALL = "--kv-cache-tokens 32768 --kv-offloading-tokens 0"  # a peer's weights need room, too
LARGE = "--kv-cache-tokens 98304 --kv-offloading-tokens 0 --max-num-batched-tokens 32768"  # 256 prompts in one step
DECODE = "peers --rounds 3 --max-num-seqs 256"
TRY = "--attention-backend torch --kv-cache-tokens 512 --offload-policy load"
FULL = {  # the most reliable ones come first, since a stopped part keeps its results so far
    6: [
        f"{DECODE} --shape tinyllama-1.1b --jobs 1,8,64 --no-transformers {SMALL}",
        f"{DECODE} --shape llama-2-7b --jobs 1,8 --no-transformers {SMALL}",
        f"{DECODE} --shape tinyllama-1.1b --jobs 256 --no-transformers {LARGE}",
        f"{DECODE} --shape tinyllama-1.1b --jobs 1,8 {SMALL}",
        f"{DECODE} --shape llama-2-7b --jobs 1 {SMALL}",
    ],
    7: ["published --kv-offloading-tokens 0"],
    8: ["paged"],
    9: [f"launches {SMALL} --shape tinyllama-1.1b", f"launches {SMALL} --shape qwen3-0.6b --batch-size 64"],
}
TINY = {
    6: [f"peers --jobs 1 --no-transformers --rounds 1 {TRY}"],
    7: [f"published --model models/storyteller --no-peer --num-requests 2 --min-len 4 --max-len 8 {TRY}"],
    8: ["paged --shape smollm2-135m --batch-sizes 1 --contexts 32 --block-sizes 16 --layers 1 --rounds 1"],
    9: [f"launches --input-len 4 --rounds 1 {TRY}"],
}


def run_benches(number: int, setup: Setup, report: PartReport) -> None:
    """Run the commands of a part."""
    for command in setup.size(FULL, TINY)[number]:
        if report.has_time(command):
            run_bench(setup, report, command)


def run_bench(setup: Setup, report: PartReport, command: str) -> None:
    """Run a command, and report its table or its error."""
    file = (setup.out / "bench.json").resolve()
    setup.out.mkdir(parents=True, exist_ok=True)
    options = ["--device", str(setup.device), "--json", str(file)]
    output, error = run(setup, ["-m", "nanovllm", "bench", *command.split(), *options])
    report.note(f"`nanovllm bench {command}`")
    report.note(error or f"```text\n{output}```")
    if not error:
        report.results["tables"][command] = json.loads(file.read_text(encoding="utf-8"))["measured"]
        file.unlink()


def run(setup: Setup, arguments: Sequence[str]) -> tuple[str, str | None]:
    """Run Python until the part's time is over. Return its output, and what went wrong."""
    seconds = max(1.0, setup.deadline - time.perf_counter())
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as late:  # its output is bytes even with text=True
        return "", f"stopped after {seconds:.0f} seconds: {last_line((late.stderr or b'').decode(errors='replace'))}"
    return done.stdout, f"exit status {done.returncode}: {last_line(done.stderr)}" if done.returncode else None


def run_tests(setup: Setup, report: PartReport) -> None:
    """Run the tests of the GPU's kernels, and those marked gpu."""
    if not setup.is_cuda:
        report.note("There is no CUDA device: every test that needs one is skipped.")
    groups = {
        "Tests of the GPU's kernels": [setup.size(KERNELS, KERNELS / "test_on_device.py")],
        "Tests marked gpu": ["-m", "gpu", *setup.size(gpu_tests(), gpu_tests()[-1:])],
    }
    for title, arguments in groups.items():
        output, error = run(setup, ["-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, arguments)])
        report.note("```text\n" + "\n".join(output.splitlines()[-40:]) + "\n```" if output else f"{title}: {error}")
        report.table(title, [{outcome: int(count) for count, outcome in OUTCOMES.findall(last_line(output))}])


def gpu_tests() -> list[Path]:
    """Return the files that have a test for a GPU. Others may import packages that are not installed."""
    folders = [ROOT / "tests", *sorted((ROOT / "stages").glob("s[0-9]*/tests"))]
    files = [path for folder in folders for path in sorted(folder.glob("test_*.py"))]
    return [path for path in files if MARKED.search(path.read_text(encoding="utf-8"))]
