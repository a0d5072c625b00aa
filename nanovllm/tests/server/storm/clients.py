"""Many streams at once. Half of the clients hang up at random moments, and the others get the same text as alone."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from tqdm import tqdm

from ...testing.served import Served
from .judge import Judge, expected_results, random_requests
from .processes import Size, metrics_of, size_of, wait_until_idle
from .wire import EVENT, StreamRequest, StreamResult, address_of, send_and_read

ARRIVAL = 1000  # clients per second
LONGEST = 300.0  # seconds that a stream may take
EACH = 1024  # bytes: less than a leaked connection, task or request
SLACK = 4 << 20  # bytes that an allocator may gain in each process
ENDLESS = 900  # tokens
FEW = 40  # events, within which a client leaves a stream
MOMENTS = ("connected", "in the head", "in the body", "before the first token", "in the stream")
WAYS = ("close", "abort", "half-close")


class HangUp(NamedTuple):
    """The moment and the way in which a client leaves."""

    moment: str
    way: str
    share: float  # of that phase that has passed

    async def happen(self, url: str, request: StreamRequest) -> None:
        """Request a long text and leave. Unless it is aborted, the engine is busy for minutes."""
        request = request._replace(body=json.dumps(request.value | {"max_tokens": ENDLESS, "ignore_eos": True}))
        reader, writer = await asyncio.open_connection(*address_of(url))
        try:
            writer.write(self._sent(request))
            if self.moment == "before the first token":
                await asyncio.sleep(self.share * 0.2)
            elif self.moment == "in the stream":
                await read_events(reader, 1 + int(self.share * FEW))
            await writer.drain()
            if self.way == "half-close":
                writer.write_eof()
                await reader.read()  # until the server closes it too
        except ConnectionError:
            pass
        finally:
            writer.transport.abort() if self.way == "abort" else writer.close()

    def _sent(self, request: StreamRequest) -> bytes:
        """Return the part of the request that precedes the moment."""
        head, body = request.head(), request.body.encode()
        if self.moment == "connected":
            return b""
        if self.moment == "in the head":
            return head[: 1 + int(self.share * (len(head) - 2))]
        if self.moment == "in the body":
            return head + body[: int(self.share * len(body))]
        return head + body


async def read_events(reader: asyncio.StreamReader, count: int) -> None:
    """Read up to `count` events, or until the stream ends."""
    received = b""
    while received.count(EVENT) < count and (piece := await reader.read(1 << 14)):
        received += piece


@dataclass
class Storm:
    """Rounds of clients of one server. A fault raises AssertionError."""

    served: Served
    requests: list[StreamRequest]
    expected: list[StreamResult]
    rng: random.Random
    judge: Judge
    counts: Counter[str] = field(default_factory=Counter)
    sizes: list[Size] = field(default_factory=list)  # after each round
    aborted_before: float = 0.0  # samples, before the first round

    def __post_init__(self) -> None:
        self.aborted_before = metrics_of(self.served)["aborted"]

    async def round(self, num_clients: int) -> None:
        """Run clients, half of whom stay. Afterwards the engine must be idle."""
        stays = [number % 2 == 0 for number in range(num_clients)]
        self.rng.shuffle(stays)
        with tqdm(total=num_clients, unit=" clients", disable=None) as bar:
            await asyncio.gather(*(self._client(stay, i / ARRIVAL, bar) for i, stay in enumerate(stays)))
        await asyncio.to_thread(wait_until_idle, self.served)
        left, aborted = self.counts["hung up in the stream"], metrics_of(self.served)["aborted"] - self.aborted_before
        assert aborted >= left, f"{left} clients left a stream, and {aborted:.0f} samples were aborted"
        self.sizes.append(size_of(self.served))
        self.judge.check_count()

    async def _client(self, stays: bool, after: float, bar: tqdm) -> None:
        i = self.rng.randrange(len(self.requests))
        hang_up = HangUp(self.rng.choice(MOMENTS), self.rng.choice(WAYS), self.rng.random())
        await asyncio.sleep(after)
        async with asyncio.timeout(LONGEST):
            if stays:
                result = await send_and_read(self.served.url, self.requests[i])
                await self.judge.judge(self.requests[i], result, self.expected[i])
                self.counts["answered"] += 1
            else:
                await hang_up.happen(self.served.url, self.requests[i])
                self.counts[f"hung up {hang_up.moment}"] += 1
        bar.update()

    def check_sizes(self, num_clients: int) -> None:
        """Compare memory after the first round, which fills caches, with the last."""
        first, last = self.sizes[0], self.sizes[-1]
        most = (len(self.sizes) - 1) * num_clients * EACH + SLACK
        for name in ("front", "engine"):
            gained = getattr(last, name) - getattr(first, name)
            sizes = "; ".join(map(str, self.sizes))
            assert gained <= most, f"the {name} gained {gained:,} bytes, and at most {most:,} are allowed: {sizes}"
        assert last.files <= first.files + 2, f"{last.files} files are open, and {first.files} were before"


async def storm(
    served: Served, num_clients: int, num_rounds: int, num_requests: int, max_tokens: int, seed: int
) -> Storm:
    """Run rounds of clients, who choose among random requests."""
    rng = random.Random(seed)
    requests = random_requests(rng, num_requests, max_tokens)
    result = Storm(served, requests, await expected_results(served.url, requests), rng, Judge(served.url))
    for _ in range(num_rounds):
        await result.round(num_clients)
    result.check_sizes(num_clients)
    return result
