"""Race the package against vLLM, llama.cpp and transformers: `make peers VLLM=PYTHON LLAMA=PYTHON`.

Three models have random weights of the storyteller's shape and of two published ones, because a step's time depends on
shapes alone. Each is written for transformers and vLLM, as a GGUF file in bfloat16, and as llama.cpp's own quantized
copies of that file. `python -m stages.bench race` races all engines, and notebooks/peers.json gets a report for each
model.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from models.training.gguf_files import llama_files
from stages.bench.__main__ import main as bench
from stages.bench.models import published, random_model, storyteller_of
from stages.bench.steady import Quiet

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "notebooks/peers.json"
MAX_LEN = 4608
JOBS = "--rounds 2 --jobs mixed,1,2,4,16 --prompts 512,4000"
BUSY = f"{JOBS} --busy-jobs mixed,1"  # not with 1.1B, which would take longer than all else
MODELS = {"7M": ("storyteller", BUSY), "135M": ("smollm2-135m", BUSY), "1.1B": ("tinyllama-1.1b", JOBS)}


def race(name: str, args: argparse.Namespace) -> dict[str, object]:
    """Race all engines with a model, and return the report."""
    shape, jobs = MODELS[name]
    folder = storyteller_of(MAX_LEN) if shape == "storyteller" else random_model(published(shape, MAX_LEN))
    with tempfile.TemporaryDirectory() as parent:
        peers = [f"vllm={args.vllm}"] if args.vllm else []
        if args.llama:
            peers += [
                f"llama.cpp:{each}={args.llama},{file}" for each, file in llama_files(folder, args.llama, Path(parent))
            ]
        report = Path(parent, "report.json")
        command = ["race", "--model", str(folder), "--dtype", "bfloat16", "--formats", "int8,int4"]
        command += ["--max-model-len", str(MAX_LEN), "--json", str(report), *(args.jobs or jobs.split())]
        if status := bench(command + [part for peer in peers for part in ("--peer", peer)]):
            sys.exit(status)
        return json.loads(report.read_text()) | {"model": name}


def main(argv: Sequence[str] | None = None, quiet: Quiet | None = None) -> None:
    """Race the models, and write the report after each one. Raise BusyMachineError if the machine does other work."""
    parser = argparse.ArgumentParser(prog="python -m stages.bench.race_models", description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM")
    parser.add_argument("--llama", metavar="PYTHON", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], help="default: all")
    parser.add_argument("--out", type=Path, default=REPORT, metavar="FILE", help="default: %(default)s")
    parser.add_argument("jobs", nargs="*", metavar="-- --jobs 1", help="other options for python -m stages.bench race")
    args = parser.parse_args(argv)
    reports = []
    for name in args.models:
        reports.append((quiet or Quiet()).measure(name, partial(race, name, args), tries=1))
        args.out.write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
