"""The report of a benchmark: a dict that programs read as JSON, and a table for people."""

import platform
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import __version__

if TYPE_CHECKING:
    from ..llm import LLM

OURS = "nanovllm"  # the column of this engine
Report = dict[str, Any]  # "bench", "settings", "machine", "measured" (numbers by column), "says" (lines) and more


def report_of(
    bench: str, options: Any, machine: dict[str, Any], measured: Mapping[str, Any], notes: Sequence[str], **extra: Any
) -> Report:
    """Return a report. `options` are the benchmark's options, or a dict of those to show. `extra` has further keys."""
    selected = options if isinstance(options, dict) else settings(options)
    return {"bench": bench, "settings": selected, "machine": machine, "measured": measured, **extra, "says": [*notes]}


def settings(options: Any) -> dict[str, Any]:
    """Return the options that aren't None, except `peer`, for a report."""
    return {name: value for name, value in asdict(options).items() if value is not None and name != "peer"}


def machine(llm: "LLM") -> dict[str, Any]:
    """Return the versions, device, model and kernels that the numbers depend on."""
    engine = llm.llm_engine
    model = f"random {Path(llm.config.model).name}" if has_random_weights(llm) else str(llm.config.model)
    dtype, stored_as = str(engine.dtype).removeprefix("torch."), engine.kv_cache.stored_as
    others = {"weights": llm.config.quantization, "KV cache": stored_as if stored_as != dtype else None}
    dtypes = ", ".join([dtype, *(f"{name} in {other}" for name, other in others.items() if other)])
    return machine_of(engine.device) | {"model": model, "dtype": dtypes, "with": engine.kernels.description}


def has_random_weights(llm: "LLM") -> bool:
    """Return True if the weights are random, so that other engines can't load the same ones."""
    return llm.config.load_format == "dummy"


def machine_of(device: torch.device) -> dict[str, Any]:
    """Return the versions of nanovllm and torch, the device, and the number of threads."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    versions = {"nanovllm": __version__, "torch": torch.__version__}
    return versions | {"device": f"{device} {name}".strip(), "threads": torch.get_num_threads()}


@contextmanager
def failure_reported(name: str, failures: list[str]) -> Iterator[None]:
    """Catch an error, such as too little memory: print it, and add a line to `failures` for the report."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, ValueError):  # the message of a ValueError is enough
            traceback.print_exception(error)
        failures.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")


def last_line(text: str) -> str:
    r"""Return the last line that is not empty, which often says why a process failed.

    >>> last_line("Traceback\nMemoryError: 3 GiB\n\n")
    'MemoryError: 3 GiB'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def text(report: Report) -> str:
    """Format the report for a terminal: a row per number, a column per engine, and notes."""
    columns: Mapping[str, Mapping[str, Any]] = report["measured"]
    names = dict.fromkeys(name for numbers in columns.values() for name in numbers)
    rows = [[name.replace("_", " "), *(shown(each.get(name)) for each in columns.values())] for name in names]
    settings = ", ".join(f"{name.replace('_', ' ')} {shown(value)}" for name, value in report["settings"].items())
    where = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    table = align_columns([["", *columns], *rows])
    return "\n".join([f"{report['bench']}: {settings}", where, "", *table, "", *report["says"]])


def align_columns(rows: Sequence[Sequence[str]], separator: str = "  ") -> list[str]:
    """Return a line per row, with all columns aligned to the right.

    >>> align_columns([["", "ms"], ["step", "12.5"]])
    ['        ms', 'step  12.5']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [separator.join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def shown(value: Any) -> str:
    """Return a value as text. A float has three significant digits, or no decimals from 1,000 on.

    >>> shown(None), shown(1234.5), shown(0.1234), shown({"p50": 1.0, "p99": 2.5}), shown("cpu")
    ('-', '1,234', '0.123', '1 / 2.5', 'cpu')
    """
    if isinstance(value, dict):
        return " / ".join(map(shown, value.values())) or "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
