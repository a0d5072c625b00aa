"""kill -9 of the engine or the front, and a restart, under clients that retry until their stream is complete."""

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

from ...testing.processes import is_alive, until
from ...testing.served import Served
from .judge import Judge, expected_results, random_requests
from .processes import check_log, storm_server, wait_until_idle
from .wire import StreamRequest, StreamResult, send_and_read

NUM_CLIENTS = 8
ALL_ENDED = 2.0  # seconds in which all processes end after the front was killed
FRONT_ENDED = 5.0  # seconds in which the front ends after the engine was killed


@dataclass
class Clients:
    """Clients that continue through all restarts, until `is_over`."""

    url: str
    requests: list[StreamRequest]
    expected: list[StreamResult]
    rng: random.Random
    judge: Judge
    counts: Counter[str] = field(default_factory=Counter)
    is_over: bool = False

    async def client(self) -> None:
        """Send one request after another."""
        while not self.is_over:
            i = self.rng.randrange(len(self.requests))
            await self.until_whole(self.requests[i], self.expected[i])

    async def until_whole(self, request: StreamRequest, expected: StreamResult) -> None:
        """Retry a request until its stream is complete. A broken stream must not look complete."""
        while True:
            with suppress(ConnectionError):  # there is no server at the moment
                result = await send_and_read(self.url, request)
                if result.is_whole:
                    await self.judge.judge(request, result, expected)
                    self.counts["whole"] += 1
                    return
                self.counts["half" if result.texts else "nothing"] += 1
                assert result.error or not result.is_done, f"{result} is neither complete nor broken"
            await asyncio.sleep(0.05)


async def kill(served: Served, victim: str) -> None:
    """Kill a process. Raise AssertionError if the other one survives or reports no error."""
    front, processes = served.process, descendants(served.process.pid)
    engine = served.engine_process()
    assert engine in processes
    if victim == "front":
        front.kill()
        await asyncio.to_thread(front.wait)
    else:
        os.kill(engine, signal.SIGKILL)
        await asyncio.to_thread(until, lambda: health(served) == 503, 1.0)
        assert await asyncio.to_thread(front.wait, FRONT_ENDED) == 1, "the front reports an error"
    await asyncio.to_thread(until, lambda: not any(map(is_alive, processes)), ALL_ENDED)


def health(served: Served) -> int | None:
    with suppress(httpx.HTTPError):
        return httpx.get(served.url + "/health", timeout=1).status_code
    return None


def descendants(process: int) -> list[int]:
    """Return all descendants of a process."""
    children = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True).stdout.split()
    return [each for child in map(int, children) for each in (child, *descendants(child))]


async def storm(folder: Path, num_kills: int, seed: int, *flags: str) -> Counter[str]:
    """Kill the engine and the front in turn. After the last restart, all clients finish and the engine is idle."""
    rng, port, clients, tasks = random.Random(seed), 0, None, []
    for number in tqdm(range(num_kills + 1), unit=" servers", disable=None):
        log = folder / f"{number}.log"
        with storm_server(log, *flags, port=port) as served:
            if clients is None:
                port = httpx.URL(served.url).port or 0
                requests = random_requests(rng, 8, 48)
                expected = await expected_results(served.url, requests)
                clients = Clients(served.url, requests, expected, rng, Judge(served.url))
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
