"""results.json: what was measured, and on which machine. stages.prose writes it into the READMEs."""

import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).with_name("results.json")


def machine(dtype: str = "float32") -> str:
    """The machine in words, for the tables, and what it computed in."""
    cores, instructions = torch.get_num_threads(), f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    return f"{cores} core{'s' * (cores > 1)} ({instructions}), torch {torch.__version__.split('+')[0]}, {dtype}"


def read(path: Path = RESULTS) -> dict[str, Any]:
    """Everything that was measured; nothing if there is no such file yet."""
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def save(results: dict[str, Any], path: Path = RESULTS) -> bool:
    """Merge into results.json, so that one part can be measured again alone. Return True if it was written.

    With a "machine": the parts that name none of their own are compared with each other, so if the others are from
    another machine a line says so, and nothing is written. Without: each part names its own.
    """
    old = read(path)
    others = [name for name in old.keys() - results.keys() if "machine" not in old[name]]
    if "machine" in results and others and old["machine"] != results["machine"]:
        here, there = results["machine"], old["machine"]
        print(f"not written: the other figures were measured on {there}, and this is {here}", file=sys.stderr)
        return False
    path.write_text(json.dumps(old | results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return True
