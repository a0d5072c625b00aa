"""Race the package against vLLM, llama.cpp and transformers: `make peers VLLM=PYTHON LLAMA=PYTHON`.

A step's time depends on shapes alone, so most models have random weights: of the storyteller's shape and of two
published ones. Each is written for transformers and vLLM, as a GGUF file in bfloat16, and, unless it is large, as
llama.cpp's own quantized copies of that file. In other races, this engine and llama.cpp read the same GGUF file:
quantized copies of the largest shape, and SmolLM2, a trained model, which answers questions.

`python -m stages.bench race` races the engines, and notebooks/peers.json gets a report for each model. `--models` races
some of them, and keeps the reports of the others.
"""

import argparse
import atexit
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from models.training.gguf_files import quantize_gguf, write_gguf
from nanovllm.checkpoints.hub import find_checkpoint
from nanovllm.checkpoints.known import KNOWN, find_known
from stages.bench.__main__ import main as bench
from stages.bench.models import published, random_model, storyteller_of
from stages.bench.results import host
from stages.bench.steady import BusyMachineError, Quiet

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "notebooks/peers.json"
MAX_LEN = 4608
OPTIONS = f"--dtype bfloat16 --max-model-len {MAX_LEN}"
JOBS = "--jobs mixed,1,2,4,16 --prompts 512,4000 --busy-jobs 1"
LONG_JOBS = "--rounds 2 --jobs 1,16 --prompts 512"  # for 1.1B, whose mixed job alone would take an hour
FILE_JOBS = "--rounds 5 --jobs 1,16"
COPIES = ("Q8_0", "Q4_0")  # of a model with random weights, for llama.cpp, as this engine has int8 and int4


class Model(NamedTuple):
    """A model in a race."""

    title: str
    shape: str  # of random weights; or the name of a known model
    jobs: str
    file_type: str = ""  # of the one GGUF file that this engine and llama.cpp read
    copies: tuple[str, ...] = COPIES


MODELS = {
    "smollm2": Model("SmolLM2 135M in Q4_1", "smollm2", f"--rounds 3 {JOBS}", "Q4_1"),
    "7M": Model("7M", "storyteller", f"--rounds 2 {JOBS}"),
    "135M": Model("135M", "smollm2-135m", f"--rounds 2 {JOBS}"),
    "1.1B": Model("1.1B", "tinyllama-1.1b", LONG_JOBS, copies=()),  # fewer engines, which share the memory
    **{
        f"1.1B-{type}": Model(f"1.1B in {type}", "tinyllama-1.1b", FILE_JOBS, type)
        for type in ("Q8_0", "Q5_K_M", "Q4_K_M")
    },
}


def race(model: Model, args: argparse.Namespace) -> dict[str, object]:
    """Race the engines with a model, and return the report."""
    with tempfile.TemporaryDirectory() as parent:
        report = Path(parent, "report.json")
        parts = same_file(model, args.llama, Path(parent)) if model.file_type else formats(model, args, Path(parent))
        command = ["race", *OPTIONS.split(), "--json", str(report), *parts, *model.jobs.split(), *args.options]
        if status := bench(command):
            sys.exit(status)
        return json.loads(report.read_text()) | {"model": model.title, "file": model.file_type}


def formats(model: Model, args: argparse.Namespace, parent: Path) -> list[str]:
    """Return the options of a race with a model in the formats that each engine has."""
    folder = folder_of(model.shape)
    peers = [f"vllm={args.vllm}"] if args.vllm else []
    if args.llama:
        original = gguf_of(model.shape)
        peers.append(f"llama.cpp:BF16={args.llama},{original}")
        for type in model.copies:
            quantize_gguf(original, type, parent / f"{type}.gguf", args.llama)
            peers.append(f"llama.cpp:{type}={args.llama},{parent / type}.gguf")
    return ["--model", str(folder), "--formats", "int8,int4", *(part for peer in peers for part in ("--peer", peer))]


def same_file(model: Model, llama: str | None, parent: Path) -> list[str]:
    """Return the options of a race in which this engine and llama.cpp read the same file."""
    if model.shape in KNOWN:
        file, written = find_known(model.shape, KNOWN[model.shape]), ["--written"]
    elif llama is None:
        sys.exit(f"{model.title}: llama.cpp has to write the file, so --llama is required")
    else:
        file, written = parent / f"{model.file_type}.gguf", []
        quantize_gguf(gguf_of(model.shape), model.file_type, file, llama)
        atexit.register(shutil.rmtree, find_checkpoint(file), ignore_errors=True)  # in the cache
    peer = ["--peer", f"llama.cpp:{model.file_type}={llama},{file}"] if llama else []
    return ["--model", str(file), "--no-transformers", *written, *peer]


def folder_of(shape: str) -> Path:
    """Return the folder of a model with random weights."""
    return storyteller_of(MAX_LEN) if shape == "storyteller" else random_model(published(shape, MAX_LEN))


@cache
def gguf_of(shape: str) -> Path:
    """Return the same model as a GGUF file in bfloat16. It is removed when the process ends."""
    parent = tempfile.TemporaryDirectory()
    atexit.register(parent.cleanup)
    file = Path(parent.name, "BF16.gguf")
    write_gguf(folder_of(shape), file)
    return file


def main(argv: Sequence[str] | None = None, quiet: Quiet | None = None) -> int:
    """Race the models, and write the report after each one. Return 1 if the machine did other work during one."""
    parser = argparse.ArgumentParser(prog="python -m stages.bench.race_models", description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM")
    parser.add_argument("--llama", metavar="PYTHON", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], help="default: all")
    parser.add_argument("--out", type=Path, default=REPORT, metavar="FILE", help="default: %(default)s")
    parser.add_argument("options", nargs="*", metavar="-- --rounds 1", help="options for python -m stages.bench race")
    args = parser.parse_args(argv)
    status = 0
    for name in args.models:
        try:
            report = (quiet or Quiet()).measure(name, partial(race, MODELS[name], args), tries=1)
        except BusyMachineError as error:
            print(error, file=sys.stderr)
            status = 1
        else:
            store(report, args.out)
    return status


def store(report: dict[str, Any], out: Path) -> None:
    """Write a report to the file, in place of an older one. Those of other models stay, with their own machines."""
    older = json.loads(out.read_text(encoding="utf-8")) if out.exists() else []
    reports = {each["model"]: each for each in [*older, report | {"host": host()}]}
    titles = [model.title for model in MODELS.values()]
    ordered = [reports[title] for title in titles if title in reports]
    out.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
