"""Measure on a GPU: `python -m stages.bench.gpu [PART ...]`, all nine by default; `make gpu PART=2 OUT=folder`."""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from stages.bench.gpu import engine, parts
from stages.bench.gpu.common import SECONDS, PartReport, Setup

PARTS: dict[int, tuple[str, Callable[[Setup, PartReport], None]]] = {
    1: ("the tests marked gpu", engine.run_tests),
    2: ("decode steps of stages 1, 2 and 3", parts.decode_steps),
    3: ("copies between host and device", parts.moves),
    4: ("the roofline", parts.roofline),
    5: ("claims about allocating, copying a block, and swapping", parts.claims),
    6: ("the finished engine: decode steps, and their part of the bandwidth", partial(engine.run_benches, 6)),
    7: ("the finished engine: nano-vllm's workload, compared with generate_batch", partial(engine.run_benches, 7)),
    8: ("the finished engine: the cost of blocks in attention", partial(engine.run_benches, 8)),
    9: ("the finished engine: launches of a step", partial(engine.run_benches, 9)),
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python -m stages.bench.gpu", description=__doc__.splitlines()[0])
    titles = "; ".join(f"{number}: {title}" for number, (title, _) in PARTS.items())
    parser.add_argument("parts", nargs="*", type=int, metavar="PART", help=titles)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu to try it out (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and one round: a test of the program itself")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="a folder (default: %(default)s)")
    args = parser.parse_args(argv)
    if invalid := {*args.parts} - PARTS.keys():
        parser.error(f"PART must be one of {', '.join(map(str, PARTS))}, got {invalid.pop()}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the parts, and write the report of each. Return 2 if the device is missing."""
    args = parse(argv)
    try:
        device = torch.device(args.device)
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        hint = "Try the parts with --device cpu --tiny"
        print(f"device {args.device!r} is unavailable: {reason}. {hint}", file=sys.stderr)
        return 2
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)  # events and streams belong to the current device
    for number in args.parts or PARTS:
        title, measure = PARTS[number]
        started = time.perf_counter()
        setup = Setup(device, args.tiny, args.out, started + SECONDS)
        report = PartReport(setup, number, title)
        try:
            measure(setup, report)
        finally:  # keep the results before an error
            report.note(f"{time.perf_counter() - started:.0f} seconds.")
            report.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
