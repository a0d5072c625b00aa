"""Many streams at once, of which half hang up at random moments: the others get what they get alone."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from tqdm import tqdm

from ..served import Served
from .asks import Judge, answers_alone, random_asks
from .processes import Size, size_of, wait_until_idle
from .wire import EVENT, Answer, Ask, address_of, ask_for

ARRIVAL = 1000  # clients a second come
LONGEST = 300.0  # seconds that a stream may take
EACH = 1024  # bytes: a client of which anything is left leaves more (its connection, its task, its request)
SLACK = 4 << 20  # bytes that an allocator may gain in any process: its pages are never quite full
MOMENTS = ("connected", "in the head", "in the body", "before the first token", "in the stream")
WAYS = ("close", "abort", "end of what is sent")


class HangUp(NamedTuple):
    moment: str
    way: str
    share: float  # of the part in which it happens

    async def happen(self, url: str, ask: Ask) -> None:
        """Ask, and go."""
        reader, writer = await asyncio.open_connection(*address_of(url))
        try:
            writer.write(self._sent(ask))
            if self.moment == "before the first token":
                await asyncio.sleep(self.share * 0.2)
            elif self.moment == "in the stream":
                await read_events(reader, 1 + int(self.share * ask.value["max_tokens"]))
            await writer.drain()
            if self.way == "end of what is sent":
                writer.write_eof()
                await reader.read()  # the server ends it, too
        except ConnectionError:
            pass
        finally:
            writer.transport.abort() if self.way == "abort" else writer.close()

    def _sent(self, ask: Ask) -> bytes:
        """As much of the request as comes before the moment."""
        head, body = ask.head(), ask.body.encode()
        if self.moment == "connected":
            return b""
        if self.moment == "in the head":
            return head[: 1 + int(self.share * (len(head) - 2))]
        if self.moment == "in the body":
            return head + body[: int(self.share * len(body))]
        return head + body


async def read_events(reader: asyncio.StreamReader, count: int) -> None:
    """Or until the stream ends."""
    found = b""
    while found.count(EVENT) < count and (piece := await reader.read(1 << 14)):
        found += piece


@dataclass
class Storm:
    """Rounds of clients of one server. Raises AssertionError for whatever must not be."""

    served: Served
    asks: list[Ask]
    alone: list[Answer]
    rng: random.Random
    judge: Judge
    counts: Counter[str] = field(default_factory=Counter)
    sizes: list[Size] = field(default_factory=list)  # after each round

    async def round(self, num_clients: int) -> None:
        """Half of them stay. When all are gone, nothing is left in the engine."""
        stays = [number % 2 == 0 for number in range(num_clients)]
        self.rng.shuffle(stays)
        with tqdm(total=num_clients, unit=" clients", disable=None) as bar:
            await asyncio.gather(*(self._client(stay, i / ARRIVAL, bar) for i, stay in enumerate(stays)))
        await asyncio.to_thread(wait_until_idle, self.served)
        self.sizes.append(size_of(self.served))
        self.judge.check_count()

    async def _client(self, stays: bool, after: float, bar: tqdm) -> None:
        place = self.rng.randrange(len(self.asks))
        goes = HangUp(self.rng.choice(MOMENTS), self.rng.choice(WAYS), self.rng.random())
        await asyncio.sleep(after)
        async with asyncio.timeout(LONGEST):
            if stays:
                answer = await ask_for(self.served.url, self.asks[place])
                await self.judge.judge(self.asks[place], answer, self.alone[place])
                self.counts["answered"] += 1
            else:
                await goes.happen(self.served.url, self.asks[place])
                self.counts[f"hung up {goes.moment}"] += 1
        bar.update()

    def check_sizes(self, num_clients: int) -> None:
        """From the first round to the last: that one has filled what is filled once."""
        first, last = self.sizes[0], self.sizes[-1]
        most = (len(self.sizes) - 1) * num_clients * EACH + SLACK
        for name in ("front", "engine"):
            gained = getattr(last, name) - getattr(first, name)
            told = "; ".join(map(str, self.sizes))
            assert gained <= most, f"the {name} has gained {gained:,} bytes, at most {most:,} are allowed: {told}"
        assert last.files <= first.files + 2, f"{last.files} files are open, {first.files} were"


async def storm(served: Served, num_clients: int, num_rounds: int, num_asks: int, most_tokens: int, seed: int) -> Storm:
    rng = random.Random(seed)
    asks = random_asks(rng, num_asks, most_tokens)
    made = Storm(served, asks, await answers_alone(served.url, asks), rng, Judge(served.url))
    for _ in range(num_rounds):
        await made.round(num_clients)
    made.check_sizes(num_clients)
    return made
