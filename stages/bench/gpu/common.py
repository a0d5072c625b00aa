"""The device of a part, the calls that it times, and its report, which is on disk after each case."""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from nanovllm.bench.engine import free_memory
from nanovllm.bench.harness import take_turns, timed
from nanovllm.bench.report import align_columns, shown
from stages.bench.models import SHAPE_135M, published, random_model
from stages.s1_contiguous_cache.llama import ModelConfig

CASE_SECONDS, LATE_SECONDS = 60.0, 20.0  # after which a case counts as stuck: in a part's time, and after it
SECONDS_TO_END = 5.0
TINY = ModelConfig(64, 16, 32, 2, 4, 2, 8, tie_word_embeddings=True, bos_token_id=1, eos_token_ids=(2,))
SHAPES: dict[str, Any] = {"135M": SHAPE_135M, "1B": published("llama-3.2-1b", 8192), "tiny": TINY}
Row = Mapping[str, Any]


class Setup(NamedTuple):
    """The device of a part, the size of its cases, and the folder of its results."""

    device: torch.device
    is_tiny: bool
    out: Path
    deadline: float  # of this part, on time.monotonic's clock

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> str:
        """The dtype of models; a tiny one computes in float32."""
        return "float32" if self.is_tiny else "bfloat16"

    @property
    def models(self) -> tuple[str, ...]:
        """The shapes that a part measures."""
        return ("tiny",) if self.is_tiny else ("135M", "1B")

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def size(self, full: Any, tiny: Any) -> Any:
        """Return the size of a case."""
        return tiny if self.is_tiny else full

    def folder(self, model: str) -> Path:
        """Return a checkpoint of this shape, with random weights."""
        return random_model(SHAPES[model])

    def wait(self) -> None:
        """Wait until the device is idle. Raise if an earlier error has left it unusable."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def turns(self, calls: Mapping[str, Callable[[], object]], rounds: int = 11) -> list[dict[str, float]]:
        """Return the seconds of calls that take turns, each until the device is idle."""
        return take_turns({name: timed(call, self.wait) for name, call in calls.items()}, self.size(rounds, 1))


class PartReport:
    """The results of a part, in a file that is current after each case.

    A process that opens the same file goes on after the last case that any earlier one began.
    """

    def __init__(self, setup: Setup, number: int, title: str) -> None:
        name = torch.cuda.get_device_name(setup.device) if setup.is_cuda else str(setup.device)
        machine = f"{name}, torch {torch.__version__}" + (", a tiny model" if setup.is_tiny else "")
        self._setup, self._file = setup, file_of(setup.out, number)
        self.results = read_results(self._file) or {"title": title, "machine": machine, "tables": {}, "notes": []}
        self.results.setdefault("measured", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
        if not self._file.exists():
            print(f"# Part {number}: {title}\n\nMeasured on {machine}.\n", flush=True)

    def add(self, title: str, rows: Mapping[str, Row]) -> None:
        """Add a table, with a line per row."""
        self.results["tables"][title] = rows
        self._write()
        print(f"\n## {title}\n\n{as_markdown(rows)}\n", flush=True)

    def table(self, title: str, cases: Mapping[str, Callable[[], Row]]) -> dict[str, dict[str, Any]]:
        """Measure the cases that no process has begun, add the table, and return its rows by case.

        An error is shown with its traceback, and the next case follows. A case that takes longer than CASE_SECONDS ends
        the process, with the stack of each thread, and so does an error that leaves the device unusable.
        """
        rows: dict[str, dict[str, Any]] = self.results["tables"].setdefault(title, {})
        for name in [name for name in cases if name not in rows]:
            if self._setup.seconds_left < 0:
                rows[name] = {"failed": "no time left"}
                continue
            rows[name] = {"failed": "it did not end"}  # unless a later line says otherwise
            self._write()
            limit = min(CASE_SECONDS, self._setup.seconds_left + LATE_SECONDS)
            faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__ or sys.stderr)
            try:
                rows[name] = dict(cases[name]())
                self._setup.wait()
            except Exception as error:
                traceback.print_exc()
                rows[name] = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
            finally:
                faulthandler.cancel_dump_traceback_later()
            print(f"{name}: " + ", ".join(f"{key} {cell(rows[name], key)}" for key in columns(rows[name])), flush=True)
            self._write()
            self._setup.wait()
            free_memory()  # parts of a case refer to each other
        self.add(title, rows)
        return rows

    def note(self, text: str) -> None:
        """Add a paragraph, once."""
        if text not in self.results["notes"]:
            self.results["notes"].append(text)
            print(f"{text}\n", flush=True)
            self._write()

    def _write(self) -> None:
        self._setup.out.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        new.replace(self._file)


def file_of(folder: Path, number: int) -> Path:
    """Return the file of a part's results."""
    return folder / f"part{number}.json"


def read_results(file: Path) -> dict[str, Any]:
    """Return the results in a file, or nothing."""
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return results


def num_begun(results: Mapping[str, Any]) -> int:
    """Return how many cases have begun."""
    return sum(map(len, results.get("tables", {}).values()))


def write_summary(folder: Path, numbers: Iterable[int]) -> Path:
    """Write summary.md, the tables of all parts, and an archive of everything in the folder. Return the archive."""
    text = ["# Results"]
    for number, results in ((number, read_results(file_of(folder, number))) for number in numbers):
        if results:
            text += [f"## Part {number}: {results['title']}", f"Measured on {results['machine']}.", *results["notes"]]
            text += [f"### {title}\n\n{as_markdown(rows)}" for title, rows in results["tables"].items() if rows]
    (folder / "summary.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
    archive = folder / "results.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        for path in sorted(folder.iterdir()):
            if path != archive and path.suffix in (".json", ".log", ".md"):
                file.add(path, path.name)
    return archive


def run(
    command: Sequence[str | Path],
    seconds: float,
    log: TextIO | None = None,
    to_end: signal.Signals = signal.SIGABRT,
    **options: Any,
) -> tuple[int, str]:
    """Run a command, show what it prints at once, and end it and all that it has started after `seconds`.

    Return its exit status, negative for a signal, and its output. `log` is a file that gets the output too. SIGABRT,
    with PYTHONFAULTHANDLER set, prints the stack of each thread.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True, **options,
    )  # fmt: skip
    assert process.stdout is not None, "a pipe"

    def end(signum: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signum)

    limit = max(1.0, seconds)
    timers = [threading.Timer(limit, end, [to_end]), threading.Timer(limit + SECONDS_TO_END, end, [signal.SIGKILL])]
    for timer in timers:
        timer.start()
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            for stream in (sys.stdout, log) if log else (sys.stdout,):
                print(line, end="", file=stream, flush=True)
        return process.wait(), "".join(lines)
    finally:
        for timer in timers:
            timer.cancel()
        end(signal.SIGTERM)  # whatever is left of it
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
        end(signal.SIGKILL)


def note_missing(report: PartReport, packages: Sequence[str]) -> set[str]:
    """Return the packages that are not installed, and name them in one line."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        report.note(f"Not installed, and left out with all that needs it: {', '.join(missing)}.")
    return {*missing}


def as_markdown(rows: Mapping[str, Row]) -> str:
    """Return a table with a line per case, and a spread behind its number.

    >>> print(as_markdown({"batch 8": {"ms": 2.0, "ms_spread": [1.5, 3.0]}, "batch 16": {}}))
    |          |           ms |
    | -------- | ------------ |
    |  batch 8 | 2 (1.5 to 3) |
    | batch 16 |            - |
    """
    names = dict.fromkeys(name for row in rows.values() for name in columns(row))
    cells = [["", *names], *([case, *(cell(row, name) for name in names)] for case, row in rows.items())]
    cells.insert(1, ["-" * max(map(len, column)) for column in zip(*cells, strict=True)])
    return "\n".join(f"| {line} |" for line in align_columns(cells, " | "))


def columns(row: Row) -> list[str]:
    """Return the names of the numbers, without those of spreads."""
    return [name for name in row if not name.endswith("_spread")]


def cell(row: Row, name: str) -> str:
    """Return a number of a row with its spread. A ratio that may be 1 is "the same", and what may be 0 is "not seen".

    >>> cell({"hidden": 0.1, "hidden_spread": [-0.5, 0.6]}, "hidden")
    'not seen (-0.5 to 0.6)'
    >>> cell({"s3_over_s1": 1.1, "s3_over_s1_spread": [0.9, 1.2]}, "s3_over_s1")
    'the same (0.9 to 1.2)'
    """
    text, spread = shown(row.get(name)), row.get(f"{name}_spread")
    if spread:
        least, largest = spread
        if least <= 0:
            text = "not seen"
        elif "_over_" in name and least <= 1 <= largest:
            text = "the same"
        text += f" ({shown(least)} to {shown(largest)})"
    return text.replace("|", "\\|")
