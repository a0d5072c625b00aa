"""A server in a process of its own, as a user starts it, and what a test asks it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ...backends.attention_backend import VARIABLE
from ..helpers import UNMEASURED

ROOT = Path(__file__).resolve().parents[3]
STORYTELLER = ROOT / "models" / "storyteller"
SECONDS = 60.0
CLIENT = httpx.Client(timeout=SECONDS, verify=False, limits=httpx.Limits(max_keepalive_connections=0))  # made once


@dataclass
class Served:
    process: subprocess.Popen[str]
    url: str

    def post(self, path: str, **body: Any) -> httpx.Response:
        return CLIENT.post(self.url + path, json=body)

    def completion(self, prompt: Any = "Once upon a time", **body: Any) -> dict[str, Any]:
        return answer(self.post("/v1/completions", prompt=prompt, **{"temperature": 0, "max_tokens": 8} | body))

    def chat(self, text: str = "Tell me of a fox.", **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        asked = {"messages": messages, "temperature": 0, "max_tokens": 8} | body
        return answer(self.post("/v1/chat/completions", **asked))

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit status."""
        self.process.send_signal(number)
        return self.process.wait(SECONDS)

    def engine_process(self) -> int:
        """The id of the engine's process: the one that multiprocessing has spawned."""
        found = subprocess.run(
            ["pgrep", "-P", str(self.process.pid), "-f", "spawn_main"], capture_output=True, text=True
        )
        return int(found.stdout)


def answer(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return response.json()


@contextmanager
def serving(*flags: str, module: str = "nanovllm", model: Path = STORYTELLER) -> Iterator[Served]:
    """A server at a free port, ended by force if a test leaves it."""
    arguments = ["serve", str(model), "--port", "0", *UNMEASURED, *flags]
    environment = os.environ | {VARIABLE: "torch", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], env=environment, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        said = process.stderr.readline()
        found = re.search(r"at (http://\S+),", said)
        assert found, said + process.stderr.read()
        yield Served(process, found[1])
    finally:
        process.kill()
        process.communicate()


def events(response: httpx.Response) -> Iterator[Any]:
    """What the events of a stream hold, as they come; the last may be [DONE]."""
    for line in response.iter_lines():
        if line:
            assert line.startswith("data: "), line
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def stream(served: Served, path: str, **body: Any) -> list[Any]:
    with CLIENT.stream("POST", served.url + path, json={"stream": True, **body}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(events(response))


def until(holds: Callable[[], bool], seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds} seconds"
        time.sleep(0.02)


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
