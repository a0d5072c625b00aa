"""python -m nanovllm.tests.server.storm: the storms at their full size, with their figures."""

import argparse
import asyncio
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from .clients import storm
from .processes import check_log, sockets_of, storm_server

SPARE = 100  # files that a process has beside the sockets of a storm


def clients(args: argparse.Namespace, log: Path) -> str:
    with storm_server(log) as served:
        room = min(raise_limit(), sockets_of(served)) - SPARE
        num_clients = min(args.clients, room)
        if num_clients < args.clients:
            print(f"only {num_clients} clients: a process may open no more files here", file=sys.stderr)
        made = asyncio.run(storm(served, num_clients, args.rounds, args.asks, args.tokens, args.seed))
        assert served.stop() == 0
    check_log(log)
    rows = [f"  round {number}: {size}" for number, size in enumerate(made.sizes, 1)]
    told = ", ".join(f"{count:,} {what}" for what, count in sorted(made.counts.items()))
    tokens = f"{made.judge.num_ties} answers differ at near ties, of {made.judge.num_tokens:,} tokens"
    return "\n".join([f"{num_clients:,} clients at once, {args.rounds} rounds: {told}; {tokens}", *rows])


STORMS: dict[str, Callable[[argparse.Namespace, Path], str]] = {"clients": clients}


def raise_limit() -> int:
    """Let this process have as many sockets as it may; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return soft
    return hard if hard != resource.RLIM_INFINITY else sys.maxsize


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m nanovllm.tests.server.storm", description=__doc__)
    made.add_argument("storms", nargs="*", metavar="NAME", help=f"of {', '.join(STORMS)} (default: all)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--clients", type=int, default=1000, help="at once (default: %(default)s)")
    made.add_argument("--rounds", type=int, default=3, help="of clients (default: %(default)s)")
    made.add_argument("--asks", type=int, default=64, help="different requests of theirs (default: %(default)s)")
    made.add_argument("--tokens", type=int, default=48, help="most tokens of an answer (default: %(default)s)")
    return made


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if unknown := set(args.storms) - set(STORMS):
        print(f"error: there is no storm {sorted(unknown)[0]}: there are {', '.join(STORMS)}", file=sys.stderr)
        return 2
    for name in args.storms or STORMS:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                told = STORMS[name](args, Path(folder) / "server.log")
            except AssertionError as error:
                print(f"{name}, seed {args.seed}: {error}", file=sys.stderr)
                return 1
        print(f"{name}, seed {args.seed}, {time.monotonic() - start:.0f} seconds: {told}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
