"""python -m nanovllm.tests.server.storm: the storms at full size, with their figures."""

import argparse
import asyncio
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from . import clients, extremes, kills, malformed
from .processes import check_log, sockets_of, storm_server

SPARE = 100  # files that a process opens besides the sockets of a storm


def run_clients(args: argparse.Namespace, folder: Path) -> str:
    log = folder / "log"
    with storm_server(log) as served:
        count = min(args.clients, raise_limit() - SPARE, sockets_of(served) - SPARE)
        if count < args.clients:
            print(f"only {count} clients: the limit of open files allows no more", file=sys.stderr)
        result = asyncio.run(clients.storm(served, count, args.rounds, args.distinct_requests, args.tokens, args.seed))
        assert served.stop() == 0, "it did not stop by itself"
    check_log(log)
    rows = [f"  round {number}: {size}" for number, size in enumerate(result.sizes, 1)]
    tokens = f"{result.judge.num_ties} outputs differ at near ties, of {result.judge.num_tokens:,} tokens"
    return "\n".join([f"{count:,} clients at once, {args.rounds} rounds: {listed(result.counts)}; {tokens}", *rows])


def run_malformed(args: argparse.Namespace, folder: Path) -> str:
    log, requests = folder / "log", malformed.bad_requests(random.Random(args.seed), args.requests)
    with storm_server(log, *malformed.FLAGS) as served:
        findings = asyncio.run(malformed.storm(served, requests, args.requests))
        assert served.stop() == 0, "it did not stop by itself"
    check_log(log)
    assert not findings.faults, "\n".join([f"{len(findings.faults)} faults:", *findings.faults[:20]])
    slowest = sorted(findings.slowest.items(), key=lambda pair: -pair[1])[:5]
    rows = [f"  {seconds:.2f} seconds: {kind}" for kind, seconds in slowest]
    gap = f"a healthy client waited {findings.gap:.2f} seconds at most, in {findings.num_healthy} streams"
    return "\n".join([f"{args.requests:,} requests: {listed(findings.statuses)}; {gap}; the slowest responses:", *rows])


def run_extremes(args: argparse.Namespace, folder: Path) -> str:
    log = folder / "log"
    with storm_server(log, "--chat-template", "plain") as served:
        gaps = asyncio.run(extremes.storm(served))
        assert served.stop() == 0, "it did not stop by itself"
    check_log(log)
    slowest = [f"  {gap:.2f} seconds: {name}" for name, gap in sorted(gaps.items(), key=lambda pair: -pair[1])[:5]]
    return "\n".join([f"{len(gaps)} extreme requests; the longest gaps of a neighbor:", *slowest])


def run_kills(args: argparse.Namespace, folder: Path) -> str:
    return f"{args.kills} kills: streams {listed(asyncio.run(kills.storm(folder, args.kills, args.seed)))}"


STORMS: dict[str, Callable[[argparse.Namespace, Path], str]] = {
    "clients": run_clients,
    "malformed": run_malformed,
    "extremes": run_extremes,
    "kills": run_kills,
}


def listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items()))


def raise_limit() -> int:
    """Raise this process's limit of open files as far as possible, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return soft
    return hard if hard != resource.RLIM_INFINITY else sys.maxsize


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m nanovllm.tests.server.storm", description=__doc__)
    result.add_argument("storms", nargs="*", metavar="NAME", help=f"of {', '.join(STORMS)} (default: all)")
    result.add_argument("--seed", type=int, default=0)
    result.add_argument("--clients", type=int, default=1000, help="at once (default: %(default)s)")
    result.add_argument("--rounds", type=int, default=3, help="of clients (default: %(default)s)")
    result.add_argument("--distinct-requests", type=int, default=64, help="of clients (default: %(default)s)")
    result.add_argument("--tokens", type=int, default=48, help="most tokens of an output (default: %(default)s)")
    result.add_argument("--requests", type=int, default=10_000, help="malformed ones (default: %(default)s)")
    result.add_argument(
        "--kills", type=int, default=6, help="of the engine and the front in turn (default: %(default)s)"
    )
    return result


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if unknown := set(args.storms) - set(STORMS):
        print(f"error: unknown storm {sorted(unknown)[0]}: choose from {', '.join(STORMS)}", file=sys.stderr)
        return 2
    for name in args.storms or STORMS:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                words = STORMS[name](args, Path(folder))
            except AssertionError as error:
                print(f"{name}, seed {args.seed}: {error}", file=sys.stderr)
                return 1
        print(f"{name}, seed {args.seed}, {time.monotonic() - start:.0f} seconds: {words}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
