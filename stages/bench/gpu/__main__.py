"""Measure on a GPU: `python -m stages.bench.gpu [PART ...]`, by default all; `make gpu PART=2 OUT=folder`."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from stages.bench.gpu import checklist, engine, parts
from stages.bench.gpu.common import PartReport, Setup, file_of, num_begun, read_results, run, write_summary

UNAVAILABLE = 2  # exit status if there is no such device
SECONDS_TO_END = 40  # before a part that is late is killed; its own watchdog is earlier
PARTS: dict[int, tuple[str, float, Callable[[Setup, PartReport], None]]] = {  # title, seconds, function
    0: ("what works", 100, checklist.measure),
    1: ("the tests marked gpu", 480, engine.run_tests),
    2: ("decode steps of stages 1, 2 and 3", 480, parts.decode_steps),
    3: ("copies between host and device", 480, parts.moves),
    4: ("the roofline", 480, parts.roofline),
    5: ("claims about allocating, copying a block, and swapping", 480, parts.claims),
    6: ("the finished engine: decode steps, and their part of the bandwidth", 480, partial(engine.run_benches, 6)),
    7: ("the finished engine: nano-vllm's workload, compared with generate_batch", 480, partial(engine.run_benches, 7)),
    8: ("the finished engine: the cost of blocks in attention", 480, partial(engine.run_benches, 8)),
    9: ("the finished engine: launches of a step", 480, partial(engine.run_benches, 9)),
    10: ("tensor parallel ranks, where there are several devices", 480, parts.tensor_parallel),
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python -m stages.bench.gpu", description=__doc__.splitlines()[0])
    titles = "; ".join(f"{number}: {title}" for number, (title, *_) in PARTS.items())
    parser.add_argument("parts", nargs="*", type=int, metavar="PART", help=titles)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu to try it out (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and one round: a test of the program itself")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="a folder (default: %(default)s)")
    parser.add_argument("--within", type=float, help="seconds that all PARTs share (default: what each one needs)")
    parser.add_argument("--seconds", type=float, help="measure one part in this process, and begin no case later")
    args = parser.parse_args(argv)
    if invalid := {*args.parts} - PARTS.keys():
        parser.error(f"PART must be one of {', '.join(map(str, PARTS))}, got {invalid.pop()}")
    if args.seconds is not None and len(args.parts) != 1:
        parser.error(f"--seconds needs one PART, got {len(args.parts)}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the parts, each in a process of its own. Return 2 if the device is missing, and 1 if a part ended early."""
    args = parse(argv)
    if args.seconds is not None:
        return measure_here(args)
    args.out.mkdir(parents=True, exist_ok=True)
    failed, numbers, end = 0, args.parts or [*PARTS], time.monotonic() + (args.within or float("inf"))
    for left, number in zip(range(len(numbers), 0, -1), numbers, strict=True):
        try:
            status = measure(number, args, min(PARTS[number][1], (end - time.monotonic()) / left))
        except BaseException:  # Ctrl-C, for one
            write_summary(args.out, PARTS)
            raise
        if status == UNAVAILABLE:
            return status
        failed += status != 0
        archive = write_summary(args.out, PARTS)
        print(f"The results are in {args.out}: summary.md, and everything in {archive.name}.\n", flush=True)
    return 1 if failed else 0


def measure(number: int, args: argparse.Namespace, seconds: float) -> int:
    """Measure a part in processes of their own: after a crash, another one goes on with the next case."""
    file, deadline, status = file_of(args.out, number), time.monotonic() + seconds, 0
    file.unlink(missing_ok=True)
    options = ["--device", args.device, "--out", str(args.out)] + ["--tiny"] * args.tiny
    variables = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "HF_HUB_OFFLINE": "1"}
    if args.device == "cpu":
        variables["TRITON_INTERPRET"] = "1"
    with file.with_suffix(".log").open("w", encoding="utf-8") as log:
        while (left := deadline - time.monotonic()) > 0:
            before = num_begun(read_results(file))
            command = [sys.executable, "-m", "stages.bench.gpu", str(number), "--seconds", f"{left:.0f}", *options]
            status, _ = run(command, left + SECONDS_TO_END, log, signal.SIGTERM, env=variables)
            if status in (0, UNAVAILABLE) or num_begun(read_results(file)) == before:
                break
    return status


def measure_here(args: argparse.Namespace) -> int:
    """Measure the rest of one part in this process."""
    try:
        device = torch.device(args.device)
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = f"{str(error).splitlines()[0]}. Try the parts with --device cpu --tiny"
        print(f"device {args.device!r} is unavailable: {reason}", file=sys.stderr)
        return UNAVAILABLE
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)  # events and streams belong to the current device
    [number] = args.parts
    title, _, function = PARTS[number]
    started = time.monotonic()
    setup = Setup(device, args.tiny, args.out, started + args.seconds)
    report = PartReport(setup, number, title)
    function(setup, report)
    report.note(f"{time.monotonic() - started:.0f} seconds.")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what this process has started, too
    sys.exit(main())
