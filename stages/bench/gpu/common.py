"""The device of a part, the calls that it times, and its report: tables in Markdown, and all numbers in JSON."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanovllm.bench.harness import take_turns, timed
from nanovllm.bench.report import aligned, shown
from stages.bench.models import SHAPE_135M, published, random_model
from stages.s1_contiguous_cache.llama import ModelConfig

SECONDS = 480  # of a part: no case begins after that, and a case takes less than a minute
TINY = ModelConfig(64, 16, 32, 2, 4, 2, 8, tie_word_embeddings=True, bos_token_id=1, eos_token_ids=(2,))
SHAPES: dict[str, Any] = {"135M": SHAPE_135M, "1B": published("llama-3.2-1b", 8192), "tiny": TINY}
Row = Mapping[str, Any]


class Setup(NamedTuple):
    """The device of a part, the size of its cases, and the folder of its results."""

    device: torch.device
    is_tiny: bool
    out: Path
    deadline: float  # of this part, on time.perf_counter's clock

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

    def size(self, full: Any, tiny: Any) -> Any:
        """Return the size of a case."""
        return tiny if self.is_tiny else full

    def folder(self, model: str) -> Path:
        """Return a checkpoint of this shape, with random weights."""
        return random_model(SHAPES[model])

    def turns(self, calls: Mapping[str, Callable[[], object]], rounds: int = 11) -> list[dict[str, float]]:
        """Return the seconds of calls that take turns, each until the device is idle."""
        wait = (lambda: torch.cuda.synchronize(self.device)) if self.is_cuda else (lambda: None)
        return take_turns({name: timed(call, wait) for name, call in calls.items()}, self.size(rounds, 1))


class PartReport:
    """The results of a part. Tables are printed as they come; write() puts all of them into two files."""

    def __init__(self, setup: Setup, number: int, title: str) -> None:
        name = torch.cuda.get_device_name(setup.device) if setup.is_cuda else str(setup.device)
        machine = f"{name}, torch {torch.__version__}" + (", a tiny model" if setup.is_tiny else "")
        self._setup, self._name = setup, f"part{number}"
        self.results: dict[str, Any] = {"title": title, "machine": machine, "tables": {}, "notes": []}
        self._text: list[str] = []
        self._print(f"# Part {number}: {title}\n\nMeasured on {machine}.\n")

    def has_time(self, case: object) -> bool:
        """Return whether the part has time for one more case, and note the case if not."""
        is_early = time.perf_counter() < self._setup.deadline
        if not is_early:
            self.note(f"Left out, because there was no time: {case}.")
        return is_early

    def table(self, title: str, rows: Sequence[Row]) -> None:
        """Add a table, a line per row."""
        self.results["tables"][title] = list(rows)
        self._print(f"## {title}\n\n{as_markdown(rows) if rows else 'Nothing was measured.'}\n")

    def note(self, text: str) -> None:
        """Add a paragraph."""
        self.results["notes"].append(text)
        self._print(f"{text}\n")

    def write(self) -> None:
        """Write the results into the folder."""
        self._setup.out.mkdir(parents=True, exist_ok=True)
        stem = self._setup.out / self._name
        stem.with_suffix(".json").write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        stem.with_suffix(".md").write_text("\n".join(self._text), encoding="utf-8")
        print(f"The results are in {stem}.json and {stem}.md.", flush=True)

    def _print(self, text: str) -> None:
        self._text.append(text)
        print(text, flush=True)


def as_markdown(rows: Sequence[Row]) -> str:
    """Return a table, with a spread behind its number.

    >>> print(as_markdown([{"batch": 8, "ms": 2.0, "ms_spread": [1.5, 3.0]}, {"batch": 16}]))
    | batch |           ms |
    | ----- | ------------ |
    |     8 | 2 (1.5 to 3) |
    |    16 |            - |
    """
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if not name.endswith("_spread")]

    def cell(row: Row, name: str) -> str:
        spread = row.get(f"{name}_spread")
        return shown(row.get(name)) + (f" ({shown(spread[0])} to {shown(spread[1])})" if spread else "")

    cells = [names, *([cell(row, name) for name in names] for row in rows)]
    cells.insert(1, ["-" * max(map(len, column)) for column in zip(*cells, strict=True)])
    return "\n".join(f"| {line} |" for line in aligned(cells, " | "))
