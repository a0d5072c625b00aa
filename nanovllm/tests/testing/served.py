"""Start a server in a process of its own, as a user would, and send requests to it."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from ...options.attention_backend import BACKEND_VARIABLE
from .engines import UNMEASURED
from .processes import REPOSITORY

STORYTELLER = REPOSITORY / "models" / "storyteller"
SECONDS = 300.0  # two ranks on a busy machine take more than one minute
CLIENT = httpx.Client(timeout=SECONDS, verify=False, limits=httpx.Limits(max_keepalive_connections=0))


@dataclass
class Served:
    """A running server and its address."""

    process: subprocess.Popen[str]
    url: str

    def post(self, path: str, **body: Any) -> httpx.Response:
        return CLIENT.post(self.url + path, json=body)

    def completion(self, prompt: Any = "Once upon a time", **body: Any) -> dict[str, Any]:
        return answer(self.post("/v1/completions", prompt=prompt, **{"temperature": 0, "max_tokens": 8} | body))

    def chat(self, text: str = "Tell me of a fox.", **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        fields = {"messages": messages, "temperature": 0, "max_tokens": 8} | body
        return answer(self.post("/v1/chat/completions", **fields))

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal. Return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(SECONDS)

    def engine_process(self) -> int:
        """Return the id of the engine's process, which multiprocessing spawned."""
        done = subprocess.run(
            ["pgrep", "-P", str(self.process.pid), "-f", "spawn_main"], capture_output=True, text=True
        )
        return int(done.stdout)


def answer(response: httpx.Response) -> dict[str, Any]:
    """Return the body of a successful response."""
    assert response.status_code == 200, response.text
    return response.json()


@contextmanager
def serving(*flags: str, module: str = "nanovllm", model: Path = STORYTELLER) -> Iterator[Served]:
    """Run a server on a free port inside a `with` block."""
    arguments = ["serve", str(model), "--port", "0", *UNMEASURED, *flags]
    environment = os.environ | {BACKEND_VARIABLE: "torch", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], env=environment, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    try:
        lines: list[str] = []
        while not (address := re.search(r"at (http://\S+),", lines[-1] if lines else "")):
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
        yield Served(process, address[1])
    finally:
        process.kill()
        process.communicate()


def events(response: httpx.Response) -> Iterator[Any]:
    """Yield the data of each event in a stream. The last one may be [DONE]."""
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


def unset(value: Any, path: str = "") -> list[str]:
    """Return the fields that the client's types require but the response lacks. The client itself doesn't check."""
    if isinstance(value, list):
        return [each for one in value for each in unset(one, path)]
    if not isinstance(value, openai.BaseModel):
        return []
    fields = type(value).model_fields.items()
    missing = [f"{path}.{name}" for name, each in fields if each.is_required() and name not in value.model_fields_set]
    return missing + [each for name, _ in fields for each in unset(getattr(value, name, None), f"{path}.{name}")]
