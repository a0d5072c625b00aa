"""Measure the stages: `python -m stages.bench [TABLE ...]`; "all" measures every table, without one scoreboard and run.

Each table goes to stages/bench/results.json as soon as it is measured, so what is stopped goes on with --resume.
`python -m stages.tools.prose` writes the figures into the prose. Give the machine to the measurement alone: every other
process that runs on it is measured too.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pprint import pformat
from typing import Any

from tqdm import tqdm

from stages.bench import claims, decode, offload, predict, prefix_cache, results, samples, scoreboard, serving

Table = Callable[[argparse.Namespace], dict[str, Any]]
TABLES: dict[str, Table] = {  # decode first: questions of stages 2 and 3 are answered from it
    "decode": decode.measure,
    "scoreboard": scoreboard.measure,
    "run": scoreboard.measure_run,
    "peers": scoreboard.measure_peers,
    "serving": serving.measure,
    "samples": samples.measure,
    "prefix_cache": prefix_cache.measure,
    "offload": offload.measure,
    "claims": claims.measure,
    **{name: partial(predict.measure, name) for name in predict.stages()},
}
USUAL_SECONDS = 60  # of a table that nobody has measured yet


def table(name: str) -> str:
    if name not in TABLES and name != "all":
        raise argparse.ArgumentTypeError(f"no table {name!r}: there are all, {', '.join(TABLES)}")
    return name


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m stages.bench", description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", type=table, metavar="TABLE", help=f"all, {', '.join(TABLES)}")
    parser.add_argument("--predict", nargs="*", metavar="STAGE", help="the lessons' questions: of these stages, or all")
    parser.add_argument("--resume", action="store_true", help="go on with all tables, where a run was stopped")
    parser.add_argument("--dtype", default="bfloat16", help="of the model of 135M parameters (default: %(default)s)")
    parser.add_argument("--no-save", action="store_true", help="print, and leave results.json as it is")
    args = parser.parse_args(argv)
    if args.resume and (args.tables or args.predict is not None or args.no_save):
        parser.error("--resume goes on with all tables: name none")
    args.is_all = args.resume or "all" in args.tables
    asked = args.predict or (list(predict.stages()) if args.predict is not None else [])
    strangers = [name for name in asked if name not in predict.stages()]
    if strangers:
        parser.error(f"no questions of {strangers[0]}: there are those of {', '.join(predict.stages())}")
    wanted = {*args.tables, *asked} or {"scoreboard", "run"}
    args.tables = [name for name in TABLES if args.is_all or name in wanted]
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure one table after the other; print each, and save it at once. Return 1 if one could not be saved."""
    args = parse(argv)
    measured = results.read().get("measured", {"machine": results.host(), "tables": {}})
    if args.resume:
        if measured["machine"] != results.host():
            told = f"nothing to go on with: that run was on {measured['machine']}, and this is {results.host()}"
            print(told, file=sys.stderr)
            return 1
        args.tables = [name for name in args.tables if name not in measured["tables"]]
    elif args.is_all and not args.no_save:
        results.begin()
    expected = {name: measured["tables"].get(name, {}).get("seconds", USUAL_SECONDS) for name in args.tables}
    is_saved = [measure(name, args, bar) for name, bar in walk(expected)]
    return 0 if all(is_saved) else 1


def walk(expected: dict[str, float]) -> Any:
    """Each table with a progress bar in seconds: how long it took when it was measured before."""
    form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, about {remaining} to go"
    with tqdm(total=sum(expected.values()), bar_format=form, disable=len(expected) < 2) as bar:
        for number, (name, seconds) in enumerate(expected.items(), start=1):
            bar.set_description(f"table {number} of {len(expected)}, {name}")
            yield name, bar
            bar.update(seconds)


def measure(name: str, args: argparse.Namespace, bar: tqdm) -> bool:
    """Measure a table, print and save it. Return False if it should have been saved and was not."""
    started = time.perf_counter()
    found = TABLES[name](args)
    seconds = time.perf_counter() - started
    text = predict.in_words(found) if name in predict.stages() else pformat(found, width=120, sort_dicts=False)
    bar.write(f"{name}, {seconds:.0f} s" + ("" if args.is_all else f"\n{text}"))
    return args.no_save or results.save(name, found, seconds)


if __name__ == "__main__":
    sys.exit(main())
