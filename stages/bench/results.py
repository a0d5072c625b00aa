"""results.json: all figures, and the machine that they were measured on. stages.tools.prose puts them into the pages.

A key is a path: value("predict.s1.cache_at_990"). Each timed figure has a spread over the rounds next to it,
cache_at_990_spread, with the smallest and the largest value, and "turns" says how often its calls were made
(steady.py). All figures come from one machine; "measured" has its name and the time of each table.
"""

import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).with_name("results.json")
SHARED = ("predict",)  # several tables write a part of it
APART = ("claims",)  # a table that names its own machine, so that `make claims` works on any


def machine(dtype: str = "float32") -> str:
    """Return the machine in words, for the tables, and the dtype."""
    return f"{host()}, {dtype}"


def host() -> str:
    """Return the processor and torch's version."""
    cores, instructions = torch.get_num_threads(), f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    version = torch.__version__.split("+")[0]
    return f"{cores} core{'s' * (cores > 1)} of {processor()} ({instructions}), torch {version}"


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name, if the system reports it."""
    lines = cpuinfo.read_text("utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "an unnamed processor"


def read(path: Path = RESULTS) -> dict[str, Any]:
    """Return all figures, or an empty dict if there is no file yet."""
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def value(key: str, path: Path = RESULTS) -> Any:
    """Return the value of a key such as "serving.s4_over_s3.ratio". Raise KeyError if it is missing."""
    result: Any = read(path)
    for part in key.split("."):
        if not isinstance(result, dict) or part not in result:
            raise KeyError(f"{path.name} has no {key}: python -m stages.bench measures it")
        result = result[part]
    return result


def decode_case(batch: int, context: int) -> dict[str, Any]:
    """Return a case of the decode table, for the storyteller's shape in float32."""
    case: dict[str, Any] = value(f"decode.cases.storyteller_float32_{batch}_{context}")
    return case


def save(table: str, result: dict[str, Any], seconds: float, path: Path = RESULTS) -> bool:
    """Merge a table's figures into results.json. If it has those of another machine, print a line and return False.

    Figures from two machines are never mixed, except for a table APART, which has its machine's name in it. begin()
    starts a run of all tables on this machine.
    """
    old = read(path)
    measured = old.get("measured", {"machine": host(), "tables": {}})
    is_ours = measured["machine"] == host()
    if not is_ours and table not in APART:
        other = measured["machine"]
        print(f"not written: the other figures were measured on {other}, but this is {host()}", file=sys.stderr)
        return False
    for key, part in result.items():
        old[key] = old.get(key, {}) | part if key in SHARED else part
    if is_ours:
        tables = measured["tables"] | {table: {"seconds": round(seconds, 1)}}
        old |= {"machine": machine(), "measured": measured | {"tables": tables}}
    write(old, path)
    return True


def begin(path: Path = RESULTS) -> None:
    """Start a run of all tables on this machine."""
    write(read(path) | {"measured": {"machine": host(), "tables": {}}}, path)


def write(results: dict[str, Any], path: Path = RESULTS) -> None:
    """Replace the file atomically, so that an interrupted run never leaves a partial one."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    new.replace(path)
