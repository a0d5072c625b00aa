"""Thousands of requests that cannot be served: each gets a 4xx in OpenAI's form at once, and nobody else waits."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tqdm import tqdm

from ..raw import Raw, exchange
from ..served import Served
from . import bad_bodies, bad_http
from .bad_bodies import Bad
from .processes import wait_until_idle
from .wire import Ask, ask_for

MAX_GAP = 1.0  # seconds in which nothing comes to a healthy client
TIME_OUT = 2.0  # seconds that the server gives a request
FLAGS = ("--header-timeout", f"{TIME_OUT}", "--body-timeout", f"{TIME_OUT}")
AT_ONCE = 8  # bad requests that are on their way
SECONDS = 1.0  # until an answer; of a slow one: behind the server's time-out
HEALTHY = Ask("/v1/completions", '{"prompt": "Once", "max_tokens": 200, "stream": true, "ignore_eos": true}')
MAKERS = {  # and how often each is taken
    bad_bodies.wrong_value: 30,
    bad_bodies.broken_json: 10,
    bad_bodies.no_object: 2,
    bad_bodies.no_number: 2,
    bad_bodies.nested: 4,
    bad_bodies.half_characters: 2,
    bad_bodies.other_encoding: 3,
    bad_bodies.doubled_keys: 1,
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
    """`without`: names of makers that are left out."""
    makers = {maker: share for maker, share in MAKERS.items() if maker.__name__ not in without}
    for maker in rng.choices(list(makers), list(makers.values()), k=count):
        yield maker(rng)


@dataclass
class Found:
    """What has come of them. Faults are kept: one does not hide the others."""

    statuses: Counter[str] = field(default_factory=Counter)
    slowest: dict[str, float] = field(default_factory=dict)  # seconds, by kind; slow ones aside
    faults: list[str] = field(default_factory=list)
    gap: float = 0.0  # the longest that a healthy client has waited, in seconds
    num_healthy: int = 0  # answers of that client

    def add(self, bad: Bad, raw: Raw) -> None:
        self.statuses[str(raw.status or "closed")] += 1
        if not bad.is_slow:
            self.slowest[bad.kind] = max(self.slowest.get(bad.kind, 0.0), raw.seconds)
        if fault := fault_of(bad, raw):
            sent = b"".join(part for part in bad.parts if isinstance(part, bytes))
            self.faults.append(f"{bad.kind}: {fault}: {sent[:300]!r}, {raw.received[:300]!r}")


def fault_of(bad: Bad, raw: Raw) -> str | None:
    if raw.seconds > SECONDS + (TIME_OUT if bad.is_slow else 0.0):
        return f"{raw.seconds:.2f} seconds"
    if raw.status is None:
        return None if bad.is_slow and raw.is_closed and not raw.received else "no answer"
    if not 400 <= raw.status < 500 or (bad.is_slow and raw.status != 408):
        return f"status {raw.status}"
    if bad.has_text:
        try:
            raw.error  # noqa: B018
        except (ValueError, AssertionError) as error:
            return f"not in OpenAI's form: {error}"
    return None


async def storm(served: Served, requests: Iterator[Bad], count: int) -> Found:
    """All of them, beside a client whose streams go on. Slow ones wait beside the others."""
    found, seats, slow = Found(), asyncio.Semaphore(AT_ONCE), []
    requests = iter(list(requests))
    healthy = asyncio.create_task(stay_healthy(served.url, found))
    with tqdm(total=count, unit=" requests", disable=None) as bar:

        async def send(bad: Bad) -> None:
            raw = await exchange(served.url, *bad.parts, is_ended=bad.is_ended, seconds=TIME_OUT + 3 * SECONDS)
            found.add(bad, raw)
            bar.update()
            if not bad.is_slow:
                seats.release()

        for bad in requests:
            if not bad.is_slow:
                await seats.acquire()
            slow.append(asyncio.create_task(send(bad)))
        await asyncio.gather(*slow)
    healthy.cancel()
    await asyncio.gather(healthy, return_exceptions=True)
    await asyncio.to_thread(wait_until_idle, served)
    if found.gap > MAX_GAP:
        found.faults.append(f"nothing has come to a healthy client for {found.gap:.2f} seconds")
    return found


async def stay_healthy(url: str, found: Found) -> None:
    """Ask for one stream after the other, and note how long nothing comes."""
    last = time.monotonic()

    def note(piece: bytes) -> None:
        nonlocal last
        now = time.monotonic()
        found.gap, last = max(found.gap, now - last), now

    while True:
        answer = await ask_for(url, HEALTHY, note)
        if not answer.is_whole:
            found.faults.append(f"a healthy client: {answer.error}")
        found.num_healthy += 1
