"""Measure on a GPU: `python -m stages.bench.gpu [PART ...]`, else all nine; `make gpu PART=2 OUT=folder`."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from stages.bench.gpu import checks, claims, copies, engine, roofline, steps
from stages.bench.gpu.common import SECONDS, Report, Setup

PARTS: dict[int, tuple[str, Callable[[Setup, Report], None]]] = {
    1: ("the tests marked gpu", checks.measure),
    2: ("decode steps of stages 1, 2 and 3", steps.measure),
    3: ("copies between host and device", copies.measure),
    4: ("the roofline", roofline.measure),
    5: ("claims about allocating, copying a block, and swapping", claims.measure),
    6: ("the finished engine: decode steps, and their part of the bandwidth", engine.part(6)),
    7: ("the finished engine: nano-vllm's workload, beside transformers' generate_batch", engine.part(7)),
    8: ("the finished engine: what blocks cost in attention", engine.part(8)),
    9: ("the finished engine: what a step starts", engine.part(9)),
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m stages.bench.gpu", description=__doc__.splitlines()[0])
    told = "; ".join(f"{number}: {title}" for number, (title, _) in PARTS.items())
    parser.add_argument("parts", nargs="*", type=int, metavar="PART", help=told)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu to try it out (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and one round: a test of the program itself")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="a folder (default: %(default)s)")
    args = parser.parse_args(argv)
    strangers = [number for number in args.parts if number not in PARTS]
    if strangers:
        parser.error(f"there is no part {strangers[0]}: there are {', '.join(map(str, PARTS))}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        device = torch.device(args.device)
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        told = f"device {args.device!r} is not to be had here: {str(error).splitlines()[0]}"
        print(f"{told}. --device cpu --tiny tries the parts out", file=sys.stderr)
        return 2
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)  # events and streams are of the current one
    for number in args.parts or PARTS:
        title, measure = PARTS[number]
        started = time.perf_counter()
        setup = Setup(device, args.tiny, args.out, started + SECONDS)
        report = Report(setup, number, title)
        try:
            measure(setup, report)
        finally:  # what was found before an error is worth keeping
            report.note(f"{time.perf_counter() - started:.0f} seconds.")
            report.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
