"""The device, a clock for it, and what a part writes: tables in Markdown, and all numbers in JSON."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stages.bench.harness import take_turns, with_spreads
from stages.bench.models import SHAPE_135M, random_model
from stages.s1_contiguous_cache.llama import ModelConfig

SECONDS = 480  # of a part: no case begins after that, and a case takes less than a minute
SHAPE_1B = ModelConfig(  # of Llama 3.2 1B
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    dtype="bfloat16",
    bos_token_id=1,
    eos_token_ids=(2,),
)
SHAPE_TINY = ModelConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_ids=(2,),
)
SHAPES: dict[str, Any] = {"135M": SHAPE_135M, "1B": SHAPE_1B, "tiny": SHAPE_TINY}  # each stage has its ModelConfig
Row = Mapping[str, Any]


class Setup(NamedTuple):
    """Where a part runs, how large its cases are, and where its results go."""

    device: torch.device
    is_tiny: bool
    out: Path
    deadline: float  # of this part, on time.perf_counter's clock

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> str:
        """bfloat16; a tiny model computes in float32."""
        return "float32" if self.is_tiny else "bfloat16"

    def size(self, full: Any, tiny: Any) -> Any:
        return tiny if self.is_tiny else full

    def folder(self, model: str) -> Path:
        """A checkpoint of this shape, with random weights."""
        return random_model(SHAPES[model])

    def options(self) -> dict[str, Any]:
        """EngineConfig's."""
        return {"device": str(self.device), "dtype": self.dtype}


class Report:
    """What a part found. Tables are printed as they come; write() puts all of it into two files."""

    def __init__(self, setup: Setup, number: int, title: str) -> None:
        self._setup, self._name = setup, f"part{number}"
        self._found: dict[str, Any] = {"title": title, "machine": machine(setup), "tables": {}, "notes": []}
        self._text: list[str] = []
        self._say(f"# Part {number}: {title}\n\nMeasured on {machine(setup)}.\n")

    def has_time(self, case: object) -> bool:
        """Whether the part has time for one more case; it says which one it leaves out."""
        if time.perf_counter() < self._setup.deadline:
            return True
        self.note(f"Left out, there was no more time: {case}.")
        return False

    def table(self, title: str, rows: Sequence[Row]) -> None:
        self._found["tables"][title] = list(rows)
        self._say(f"## {title}\n\n{as_markdown(rows)}" if rows else f"## {title}\n\nNothing was measured.\n")

    def note(self, text: str) -> None:
        self._found["notes"].append(text)
        self._say(f"{text}\n")

    def write(self) -> None:
        self._setup.out.mkdir(parents=True, exist_ok=True)
        stem = self._setup.out / self._name
        stem.with_suffix(".json").write_text(json.dumps(self._found, indent=1) + "\n", encoding="utf-8")
        stem.with_suffix(".md").write_text("\n".join(self._text), encoding="utf-8")
        print(f"{stem}.json and {stem}.md have it.", flush=True)

    def _say(self, text: str) -> None:
        self._text.append(text)
        print(text, flush=True)


def machine(setup: Setup) -> str:
    name = torch.cuda.get_device_name(setup.device) if setup.is_cuda else str(setup.device)
    return f"{name}, torch {torch.__version__}" + (", a tiny model" if setup.is_tiny else "")


def as_markdown(rows: Sequence[Row]) -> str:
    """A line a row. A spread stands behind its number.

    >>> print(as_markdown([{"batch": 8, "ms": 2.0, "ms_spread": [1.5, 3.0]}, {"batch": 16}]), end="")
    | batch | ms |
    |---|---|
    | 8 | 2 (1.5 to 3) |
    | 16 | - |
    """
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if not name.endswith("_spread")]
    lines = [names, ["---"] * len(names), *([cell(row, name) for name in names] for row in rows)]
    text = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return text.replace("| --- ", "|---", len(names)).replace("--- |\n", "---|\n").replace("|--- |", "|---|")


def cell(row: Row, name: str) -> str:
    if name not in row:
        return "-"
    both = row.get(f"{name}_spread")
    return shown(row[name]) + (f" ({shown(both[0])} to {shown(both[1])})" if both else "")


def shown(value: Any) -> str:
    """
    >>> shown(1234567), shown(1234.5), shown(0.012345), shown("pinned")
    ('1,234,567', '1,234', '0.0123', 'pinned')
    """
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


# ---- a clock


def timed_on(device: torch.device, call: Callable[[], object]) -> Callable[[], float]:
    """The same call, which now returns its seconds: on CUDA until all that it launched is done."""
    if device.type != "cuda":
        return lambda: wall_seconds(device, call)

    def run() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000

    return run


def wall_seconds(device: torch.device, call: Callable[[], object]) -> float:
    """Of the host's clock, until the device is idle again: with the time in which nothing is launched yet."""
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(
    setup: Setup, calls: Mapping[str, Callable[[], object]], rounds: int = 15, scale: float = 1000
) -> dict[str, Any]:
    """The median of each call and its spread, in milliseconds; the calls take turns."""
    times = take_turns({name: timed_on(setup.device, call) for name, call in calls.items()}, setup.size(rounds, 1))
    return with_spreads([{name: scale * seconds for name, seconds in each.items()} for each in times])
