"""Thousands of invalid requests: each gets a 4xx in OpenAI's form immediately, and no other client waits."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tqdm import tqdm

from ...testing.raw_http import Raw, exchange
from ...testing.served import Served
from . import bad_bodies, bad_http
from .bad_bodies import Bad
from .processes import wait_until_idle
from .wire import StreamRequest, send_and_read

MAX_GAP = 1.0  # seconds that a healthy client may wait for data
TIME_OUT = 2.0  # seconds that the server waits for a request
FLAGS = ("--header-timeout", f"{TIME_OUT}", "--body-timeout", f"{TIME_OUT}")
AT_ONCE = 8  # bad requests in flight
SECONDS = 1.0  # until a response; for a slow request, after the server's time-out
HEALTHY = StreamRequest("/v1/completions", '{"prompt": "Once", "max_tokens": 200, "stream": true, "ignore_eos": true}')
MAKERS = {  # with weights
    bad_bodies.wrong_value: 30,
    bad_bodies.broken_json: 10,
    bad_bodies.not_an_object: 2,
    bad_bodies.bad_number: 2,
    bad_bodies.nested: 4,
    bad_bodies.half_characters: 2,
    bad_bodies.other_encoding: 3,
    bad_bodies.other_type: 2,
    bad_bodies.huge: 2,
    bad_http.method: 4,
    bad_http.target: 4,
    bad_http.first_line: 4,
    bad_http.header: 5,
    bad_http.many_headers: 1,
    bad_http.host: 1,
    bad_http.length: 4,
    bad_http.wrong_length: 3,
    bad_http.both_lengths: 3,
    bad_http.coding: 3,
    bad_http.chunks: 5,
    bad_http.in_pieces: 2,
    bad_http.expecting: 1,
    bad_http.noise: 3,
    bad_http.slow: 4,
}


def bad_requests(rng: random.Random, count: int, without: frozenset[str] = frozenset()) -> Iterator[Bad]:
    """Yield random bad requests. `without` names makers to leave out."""
    makers = {maker: share for maker, share in MAKERS.items() if maker.__name__ not in without}
    for maker in rng.choices(list(makers), list(makers.values()), k=count):
        yield maker(rng)


@dataclass
class Findings:
    """The responses. Faults are collected, so that one does not hide the others."""

    statuses: Counter[str] = field(default_factory=Counter)
    slowest: dict[str, float] = field(default_factory=dict)  # seconds, by kind; without slow requests
    faults: list[str] = field(default_factory=list)
    gap: float = 0.0  # seconds, the longest wait of a healthy client
    num_healthy: int = 0  # streams of that client

    def add(self, bad: Bad, raw: Raw) -> None:
        """Add a response."""
        self.statuses[str(raw.status or "closed")] += 1
        if not bad.is_slow:
            self.slowest[bad.kind] = max(self.slowest.get(bad.kind, 0.0), raw.seconds)
        if fault := fault_of(bad, raw):
            sent = b"".join(part for part in bad.parts if isinstance(part, bytes))
            self.faults.append(f"{bad.kind}: {fault}: {sent[:300]!r}, {raw.received[:300]!r}")


def fault_of(bad: Bad, raw: Raw) -> str | None:
    """Return the fault of a response, if it has one."""
    if raw.seconds > SECONDS + (TIME_OUT if bad.is_slow else 0.0):
        return f"{raw.seconds:.2f} seconds"
    if raw.status is None:
        return None if bad.is_slow and raw.is_closed and not raw.received else "no response"
    if not 400 <= raw.status < 500 or (bad.is_slow and raw.status != 408):
        return f"status {raw.status}"
    if bad.has_text:
        try:
            raw.error  # noqa: B018
        except (ValueError, AssertionError) as error:
            return f"not in OpenAI's form: {error}"
    return None


async def storm(served: Served, requests: Iterator[Bad], count: int) -> Findings:
    """Send all requests next to a healthy client. Slow ones don't hold up the others."""
    findings, seats, tasks = Findings(), asyncio.Semaphore(AT_ONCE), []
    requests = iter(list(requests))
    healthy = asyncio.create_task(stay_healthy(served.url, findings))
    with tqdm(total=count, unit=" requests", disable=None) as bar:

        async def send(bad: Bad) -> None:
            seconds = TIME_OUT + 3 * SECONDS
            raw = await exchange(served.url, *bad.parts, is_ended=bad.is_ended, seconds=seconds, pause=asyncio.sleep)
            findings.add(bad, raw)
            bar.update()
            if not bad.is_slow:
                seats.release()

        for bad in requests:
            if not bad.is_slow:
                await seats.acquire()
            tasks.append(asyncio.create_task(send(bad)))
        await asyncio.gather(*tasks)
    healthy.cancel()
    await asyncio.gather(healthy, return_exceptions=True)
    await asyncio.to_thread(wait_until_idle, served)
    if findings.gap > MAX_GAP:
        findings.faults.append(f"a healthy client waited for {findings.gap:.2f} seconds")
    return findings


async def stay_healthy(url: str, findings: Findings) -> None:
    """Request one stream after another, and measure the longest gap between pieces."""
    last = time.monotonic()

    def measure(piece: bytes) -> None:
        nonlocal last
        now = time.monotonic()
        findings.gap, last = max(findings.gap, now - last), now

    while True:
        result = await send_and_read(url, HEALTHY, measure)
        if not result.is_whole:
            findings.faults.append(f"a healthy client: {result.error}")
        findings.num_healthy += 1
