"""Parts 6 to 9: the finished engine, by commands of nanovllm bench. Each is a process, whose memory goes with it."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from stages.bench.gpu.common import Report, Row, Setup, shown

ROOT = Path(__file__).resolve().parents[3]
SMALL_POOL = ("--kv-cache-tokens", "32768", "--kv-offloading-tokens", "0")  # a peer's weights need room, too
ONE_PREFILL = ("--max-num-batched-tokens", "32768")  # 256 prompts of 128: all sequences decode in all other steps
LARGER_POOL = ("--kv-cache-tokens", "98304", "--kv-offloading-tokens", "0")
TINY = ("--attention-backend", "torch", "--kv-cache-tokens", "512", "--offload-policy", "load")


class Bench(NamedTuple):
    title: str
    command: tuple[str, ...]  # behind `nanovllm bench`


def decodes(shape: str, jobs: str, peer: bool, *more: str) -> tuple[str, ...]:
    who = () if peer else ("--no-transformers",)
    return "peers", "--shape", shape, "--jobs", jobs, "--rounds", "3", "--max-num-seqs", "256", *who, *more


PUBLISHED = ("published", "--kv-offloading-tokens", "0")
LAUNCHES = ("launches", *SMALL_POOL)
FULL = {  # what is surest comes first: a part that is stopped keeps what it has
    6: [
        Bench("Decode, 1.1B, bfloat16", decodes("tinyllama-1.1b", "1,8,64", False, *SMALL_POOL)),
        Bench("Decode, 7B, bfloat16", decodes("llama-2-7b", "1,8", False, *SMALL_POOL)),
        Bench("Decode, 1.1B, 256", decodes("tinyllama-1.1b", "256", False, *LARGER_POOL, *ONE_PREFILL)),
        Bench("Decode beside transformers, 1.1B", decodes("tinyllama-1.1b", "1,8", True, *SMALL_POOL)),
        Bench("Decode beside transformers, 7B", decodes("llama-2-7b", "1", True, *SMALL_POOL)),
    ],
    7: [Bench("nano-vllm's workload, Qwen3-0.6B shapes", PUBLISHED)],
    8: [Bench("Paged and contiguous, shapes of Llama 3.1 8B", ("paged",))],
    9: [
        Bench("A step of one sequence, 1.1B", (*LAUNCHES, "--shape", "tinyllama-1.1b")),
        Bench("A step of 64 sequences, Qwen3-0.6B", (*LAUNCHES, "--shape", "qwen3-0.6b", "--batch-size", "64")),
    ],
}
TINY_LENGTHS = ("--no-peer", "--num-requests", "2", "--min-len", "4", "--max-len", "8")
TINY_PAGED = ("paged", "--shape", "smollm2-135m", "--batch-sizes", "1", "--contexts", "32", "--block-sizes", "16")
TRIED = {
    6: [Bench("Decode", ("peers", "--jobs", "1", "--rounds", "1", "--no-transformers", *TINY))],
    7: [Bench("nano-vllm's workload", ("published", "--model", "models/storyteller", *TINY_LENGTHS, *TINY))],
    8: [Bench("Paged and contiguous", (*TINY_PAGED, "--layers", "1", "--rounds", "1"))],
    9: [Bench("A step of one sequence", ("launches", "--rounds", "1", "--input-len", "4", *TINY))],
}


def part(number: int) -> Callable[[Setup, Report], None]:
    def measure(setup: Setup, report: Report) -> None:
        for bench in setup.size(FULL, TRIED)[number]:
            if report.has_time(bench.title):
                run(setup, report, bench)

    return measure


def run(setup: Setup, report: Report, bench: Bench) -> None:
    """What goes wrong is told in the report. A process that takes longer than the part may is stopped."""
    file, seconds = setup.out / "bench.json", max(1.0, setup.deadline - time.perf_counter())
    setup.out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "nanovllm", "bench", *bench.command, "--device", str(setup.device)]
    report.note(f"`nanovllm bench {' '.join(bench.command)}`")
    try:
        done = subprocess.run(
            [*command, "--json", str(file.resolve())], cwd=ROOT, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired as late:  # its output is bytes, whatever was asked for
        told = (late.stderr or b"").decode(errors="replace")
        report.note(f"{bench.title}: stopped after {seconds:.0f} seconds: {last_line(told)}")
        return
    if done.returncode:
        report.note(f"{bench.title}: exit status {done.returncode}: {last_line(done.stderr)}")
        return
    found = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    report.table(f"{bench.title}; {found['machine'].get('with', 'all ways')}", rows_of(found["measured"]))
    for line in found["says"]:
        report.note(line)


def rows_of(measured: dict[str, dict[str, Any]]) -> list[Row]:
    """A row for each number, a column for each that was measured.

    >>> rows_of({"a": {"ms": 2.0}, "b": {"ms": {"median": 3.0, "least": 1.0, "largest": 4.0}}})
    [{'number': 'ms', 'a': 2.0, 'b': '3 / 1 / 4'}]
    """
    names = dict.fromkeys(name for numbers in measured.values() for name in numbers)
    return [
        {"number": name} | {who: as_cell(numbers[name]) for who, numbers in measured.items() if name in numbers}
        for name in names
    ]


def as_cell(value: Any) -> Any:
    return " / ".join(map(shown, value.values())) if isinstance(value, dict) else value


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
