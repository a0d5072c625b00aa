"""Measure the stages: `python -m stages.bench [TABLE ...] [--predict [STAGE ...]]`, else scoreboard and run.

Results go to stages/bench/results.json; `python -m stages.prose` writes them into the READMEs. Give the machine to the
measurement alone: every other process that runs on it is measured too.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pprint import pprint
from typing import Any

from stages.bench import decode, offload, prefix_cache, results, sampler, samples, scoreboard, serving
from stages.bench.models import STORYTELLER
from stages.bench.predict import answers
from stages.bench.predict.s1 import holes

TABLES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "scoreboard": scoreboard.measure,
    "run": scoreboard.measure_run,
    "peers": scoreboard.measure_peers,
    "decode": decode.measure,
    "serving": serving.measure,
    "overhead": serving.measure_overhead,
    "samples": samples.measure,
    "sampler": sampler.measure,
    "prefix_cache": prefix_cache.measure,
    "offload": offload.measure,
}


def table(name: str) -> str:
    if name not in TABLES:
        raise argparse.ArgumentTypeError(f"no table {name!r}: there are {', '.join(TABLES)}")
    return name


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m stages.bench", description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", type=table, metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--predict", nargs="*", metavar="STAGE", help="the lessons' questions: of these stages, or all")
    parser.add_argument("--dtype", default="bfloat16", help="of the model of 135M parameters (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="of serving (default: %(default)s)")
    parser.add_argument("--peers", action="store_true", help="serving: transformers too")
    parser.add_argument("--no-save", action="store_true", help="print, and leave results.json as it is")
    args = parser.parse_args(argv)
    if not args.tables and args.predict is None:
        args.tables = ["scoreboard", "run"]
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure what is asked for, one after the other; print each, and save it at once."""
    args = parse(argv)
    measures = [partial(TABLES[name], args) for name in args.tables]
    if args.predict is not None:
        measures.append(partial(predict, args.predict))
    for measure in measures:
        found = measure()
        pprint(found, width=120, sort_dicts=False)
        if any("machine" not in part for part in found.values()):  # these share one
            found["machine"] = results.machine()
        if not args.no_save and results.save(found):
            print(f"{results.RESULTS} has it now; python -m stages.prose writes it into the READMEs")
    return 0


def predict(stages: list[str]) -> dict[str, Any]:
    """The answers of these stages, or of all; the others keep theirs."""
    kept = results.read().get("predict", {})
    found: dict[str, Any] = {"predict": kept | answers(STORYTELLER, stages)}
    for entry in (entry for stage in found["predict"].values() for entry in stage["answers"]):
        print(f"{entry['question']}\n  {entry['answer']}")
    return found | ({"holes": holes(STORYTELLER)} if not stages or "s1" in stages else {})


if __name__ == "__main__":
    sys.exit(main())
