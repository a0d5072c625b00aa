"""Measure the stages: `python -m stages.bench [TABLE ...]`, or "all"; with no TABLE, only scoreboard and run.

Each table goes to stages/bench/results.json as soon as it is measured, so --resume continues a run that was stopped.
`python -m stages.tools.prose` writes the figures into the prose. Run nothing else on the machine meanwhile: a table
that is saved waits for other processes to end, and is measured again if one worked beside it (steady.py).
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pprint import pformat
from typing import Any

from tqdm import tqdm

from stages.bench import (
    beams,
    claims,
    decode_step,
    drafts,
    kernel,
    offload,
    predict,
    results,
    samples,
    scoreboard,
    serving,
    two_engines,
    two_ranks,
)
from stages.bench.commands import bench
from stages.bench.engines import PACKAGES
from stages.bench.steady import BusyMachineError, Quiet

Table = Callable[[argparse.Namespace], dict[str, Any]]
TABLES: dict[str, Table] = {  # decode first: the answers of stages 2 and 3 need it
    "decode": decode_step.measure,
    "scoreboard": scoreboard.measure,
    "run": scoreboard.measure_run,
    "peers": scoreboard.measure_peers,
    "serving": serving.measure,
    "beams": beams.measure,
    "samples": samples.measure,
    "prefix_cache": serving.measure_prefix_cache,
    "offload": offload.measure,
    "drafts": drafts.measure,
    "kernel": kernel.measure,
    "two_engines": two_engines.measure,
    "two_ranks": two_ranks.measure,
    "claims": claims.measure,
    **{name: partial(predict.measure, name) for name in PACKAGES},
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the options. `tables` has the names to measure, each after the tables that it needs."""
    epilog = f"Instead of tables, a benchmark of the package, with options of its own: {', '.join(bench.commands)}"
    parser = argparse.ArgumentParser(prog="python -m stages.bench", description=__doc__.splitlines()[0], epilog=epilog)
    parser.add_argument(
        "tables", nargs="*", metavar="TABLE", help=f"all, {', '.join(TABLES)}; s1 to s7: the lessons' questions"
    )
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run of all tables")
    parser.add_argument("--dtype", default="float32", help="of the model of 135M parameters (default: %(default)s)")
    parser.add_argument("--no-save", action="store_true", help="print the results without changing results.json")
    args = parser.parse_args(argv)
    if args.resume and (args.tables or args.no_save):
        parser.error("--resume measures all tables: name none")
    if invalid := [name for name in args.tables if name not in ("all", *TABLES)]:
        parser.error(f"TABLE must be one of all, {', '.join(TABLES)}, got {invalid[0]}")
    args.is_all = args.resume or "all" in args.tables
    chosen = args.tables or ["scoreboard", "run"]
    args.tables = [name for name in TABLES if args.is_all or name in chosen]
    return args


def main(argv: list[str] | None = None, quiet: Quiet | None = None) -> int:
    """Measure one table after the other, and print and save each one. Return 1 if one could not be saved."""
    args = parse(argv)
    measured = results.read().get("measured", {"machine": results.host(), "tables": {}})
    if args.resume:
        if measured["machine"] != results.host():
            reason = f"that run was on {measured['machine']}, but this is {results.host()}"
            print(f"nothing to resume: {reason}", file=sys.stderr)
            return 1
        args.tables = [name for name in args.tables if name not in measured["tables"]]
    elif args.is_all and not args.no_save:
        results.begin()
    try:
        shown = tqdm(args.tables, "tables", disable=len(args.tables) < 2)
        return 0 if all([measure(name, args, quiet or Quiet()) for name in shown]) else 1
    except BusyMachineError as error:
        print(error, file=sys.stderr)
        return 1


def measure(name: str, args: argparse.Namespace, quiet: Quiet) -> bool:
    """Measure a table, print it and save it. Return False if it could not be saved.

    Raise BusyMachineError if it is to be saved and the machine does other work.
    """
    call = partial(timed_table, name, args)
    result, seconds = call() if args.no_save else quiet.measure(name, call)
    text = pformat(result, width=120, sort_dicts=False)
    tqdm.write(f"{name}, {seconds:.0f} s" + ("" if args.is_all else f"\n{text}"))
    return args.no_save or results.save(name, result, seconds)


def timed_table(name: str, args: argparse.Namespace) -> tuple[dict[str, Any], float]:
    """Measure a table. Return its figures, and the seconds that it took."""
    started = time.perf_counter()
    result = TABLES[name](args)
    return result, time.perf_counter() - started
