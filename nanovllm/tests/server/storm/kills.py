"""kill -9 of the engine or of the front, and a restart, under clients that ask again until their answer is whole."""

import asyncio
import os
import random
import signal
import subprocess
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from tqdm import tqdm

from ..served import Served, is_alive, until
from .asks import Judge, answers_alone, random_asks
from .processes import check_log, storm_server, wait_until_idle
from .wire import Answer, Ask, ask_for

NUM_CLIENTS = 8
GONE = 2.0  # seconds in which nothing is left of a server whose front was killed
ENDED = 5.0  # seconds in which the front of a dead engine ends


@dataclass
class Clients:
    """They go on until `is_over`, through all restarts."""

    url: str
    asks: list[Ask]
    alone: list[Answer]
    rng: random.Random
    judge: Judge
    counts: Counter[str] = field(default_factory=Counter)
    is_over: bool = False

    async def client(self) -> None:
        while not self.is_over:
            place = self.rng.randrange(len(self.asks))
            await self.until_whole(self.asks[place], self.alone[place])

    async def until_whole(self, ask: Ask, alone: Answer) -> None:
        """What breaks off may have said a part of the text, and nothing else."""
        while True:
            with suppress(ConnectionError):  # refused: there is no server at the moment
                answer = await ask_for(self.url, ask)
                if answer.is_whole:
                    await self.judge.judge(ask, answer, alone)
                    self.counts["whole"] += 1
                    return
                self.counts["half" if answer.texts else "nothing"] += 1
                assert answer.error or not answer.is_done, f"{answer} is neither whole nor broken"
            await asyncio.sleep(0.05)


async def kill(served: Served, victim: str) -> None:
    """Kill a process. Raises AssertionError if the other one stays, or does not say what has happened."""
    front, everybody = served.process, descendants(served.process.pid)
    engine = served.engine_process()
    assert engine in everybody
    if victim == "front":
        front.kill()
        await asyncio.to_thread(front.wait)
    else:
        os.kill(engine, signal.SIGKILL)
        await asyncio.to_thread(until, lambda: health(served) == 503, 1.0)
        assert await asyncio.to_thread(front.wait, ENDED) == 1, "the front ends, and says that something was wrong"
    await asyncio.to_thread(until, lambda: not any(map(is_alive, everybody)), GONE)


def health(served: Served) -> int | None:
    with suppress(httpx.HTTPError):
        return httpx.get(served.url + "/health", timeout=1).status_code
    return None


def descendants(process: int) -> list[int]:
    """Its children and theirs."""
    found = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True).stdout.split()
    return [each for child in map(int, found) for each in (child, *descendants(child))]


async def storm(folder: Path, num_kills: int, seed: int, *flags: str) -> Counter[str]:
    """The engine and the front in turn. After the last restart all clients are answered, and nothing is left."""
    rng, port, clients, tasks = random.Random(seed), 0, None, []
    for number in tqdm(range(num_kills + 1), unit=" servers", disable=None):
        log = folder / f"{number}.log"
        with storm_server(log, *flags, port=port) as served:
            if clients is None:
                port = httpx.URL(served.url).port or 0
                asks = random_asks(rng, 8, 48)
                alone = await answers_alone(served.url, asks)
                clients = Clients(served.url, asks, alone, rng, Judge(served.url))
                tasks = [asyncio.create_task(clients.client()) for _ in range(NUM_CLIENTS)]
            await asyncio.sleep(rng.uniform(0.1, 1.5))
            if number < num_kills:
                await kill(served, ("engine", "front")[number % 2])
            else:
                clients.is_over = True
                await asyncio.gather(*tasks)
                await asyncio.to_thread(wait_until_idle, served)
                assert served.stop() == 0
        check_log(log)
        for task in tasks:
            assert not task.done() or task.exception() is None, task.exception()
    assert clients is not None
    clients.judge.check_count()
    return clients.counts
