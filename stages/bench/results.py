"""results.json: what was measured, and on which machine. stages.tools.prose writes it into the READMEs.

A key is a path in it: value("predict.s1.cache_at_990"). Beside a timed figure stands its spread over the rounds,
cache_at_990_spread: the least and the largest. All of it is of one machine; "measured" names it, and each table's time.
"""

import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).with_name("results.json")


def machine(dtype: str = "float32") -> str:
    """The machine in words, for the tables, and what it computed in."""
    return f"{host()}, {dtype}"


def host() -> str:
    """The processor and torch's version."""
    cores, instructions = torch.get_num_threads(), f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    version = torch.__version__.split("+")[0]
    return f"{cores} core{'s' * (cores > 1)} of {processor()} ({instructions}), torch {version}"


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What the processor calls itself, where the system says it."""
    lines = cpuinfo.read_text("utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "an unnamed processor"


def read(path: Path = RESULTS) -> dict[str, Any]:
    """Everything that was measured; nothing if there is no such file yet."""
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def value(key: str, path: Path = RESULTS) -> Any:
    """What stands under a key, as marks in prose write it: value("serving.s4_over_s3.ratio"). Raises KeyError."""
    found: Any = read(path)
    for part in key.split("."):
        if not isinstance(found, dict) or part not in found:
            raise KeyError(f"{path.name} has no {key}: python -m stages.bench measures it")
        found = found[part]
    return found


def decode_case(batch: int, context: int) -> dict[str, Any]:
    """A case of the decode table, on the storyteller's shape in float32: its questions are asked there alone."""
    return value(f"decode.cases.storyteller_float32_{batch}_{context}")


def save(table: str, found: dict[str, Any], seconds: float, path: Path = RESULTS) -> bool:
    """Merge what a table found into results.json. Return True if it was written.

    Figures of two machines are never mixed. If the others are of another machine, a line says so and nothing is
    written; begin() makes room for a run of all tables on this one.
    """
    old = read(path)
    measured = old.get("measured", {"machine": host(), "tables": {}})
    if measured["machine"] != host():
        there = measured["machine"]
        print(f"not written: the other figures were measured on {there}, and this is {host()}", file=sys.stderr)
        return False
    for key, part in found.items():
        old[key] = old.get(key, {}) | part if key in SHARED else part
    tables = measured["tables"] | {table: {"seconds": round(seconds, 1)}}
    write(old | {"machine": machine(), "measured": measured | {"tables": tables}}, path)
    return True


SHARED = ("predict",)  # several tables write a part of it


def begin(path: Path = RESULTS) -> None:
    """A run of all tables begins on this machine: none of it is there yet."""
    write(read(path) | {"measured": {"machine": host(), "tables": {}}}, path)


def write(results: dict[str, Any], path: Path = RESULTS) -> None:
    """All of it, or what was there stays: a run that is stopped leaves a file that can be read."""
    whole = path.with_suffix(".new")
    whole.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    whole.replace(path)
