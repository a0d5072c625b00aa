"""The numbers of a benchmark as a table, and as JSON."""

import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...llm import LLM


def machine(llm: LLM) -> dict[str, Any]:
    """What the numbers belong to."""
    engine = llm.llm_engine
    return machine_of(engine.device) | {
        "model": f"random {Path(llm.config.model).name}" if has_random_weights(llm) else str(llm.config.model),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "with": engine.kernels.says,
    }


def has_random_weights(llm: LLM) -> bool:
    return llm.config.load_format == "dummy"


def machine_of(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "nanovllm": __version__,
        "torch": torch.__version__,
        "device": f"{device} {name}".strip(),
        "threads": torch.get_num_threads(),
    }


def table(found: Mapping[str, Any]) -> str:
    """A line a number, a column for each that was measured, then what else there is to say."""
    columns: dict[str, dict[str, Any]] = found["measured"]
    names = list(dict.fromkeys(name for numbers in columns.values() for name in numbers))
    rows = [[shown(numbers.get(name)) for numbers in columns.values()] for name in names]
    cells = [["", *columns], *([name.replace("_", " "), *row] for name, row in zip(names, rows, strict=True))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    settings = ", ".join(f"{name.replace('_', ' ')} {shown(value)}" for name, value in found["settings"].items())
    where = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    return "\n".join([f"{found['bench']}: {settings}", where, "", *lines, "", *found["says"]])


def shown(value: Any) -> str:
    """
    >>> shown(None), shown(1234.5), shown(0.1234), shown({"p50": 1.0, "p99": 2.5}), shown("cpu")
    ('-', '1,234', '0.123', '1 / 2.5', 'cpu')
    """
    if isinstance(value, dict):
        return " / ".join(map(shown, value.values())) or "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def write_json(found: Mapping[str, Any], file: str) -> None:
    """- is standard output."""
    text = json.dumps(found, indent=2) + "\n"
    if file == "-":
        sys.stdout.write(text)
        return
    with open(file, "w", encoding="utf-8") as stream:
        stream.write(text)
