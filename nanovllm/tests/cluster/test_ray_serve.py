"""`serve run` on a local cluster: prefixes stay on their replicas, replicas die, more of them start, and some stop."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from ..testing.checkpoints import write_checkpoint
from ..testing.engines import OPTIONS
from ..testing.processes import REPOSITORY, descendants, titled, until

pytest.importorskip("ray")
pytestmark = pytest.mark.nightly
CLIENT = httpx.Client(timeout=120)
REPLICA = "ray::ServeReplica:{}:Replica"
LONG = {"temperature": 0, "max_tokens": 3000, "ignore_eos": True, "stream": True}
FEW = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def process(tmp_path_factory) -> Iterator[subprocess.Popen]:
    """Run two applications: /fixed has two replicas, /scaled one or two."""
    folder = tmp_path_factory.mktemp("serve")
    model = write_checkpoint(folder, max_position_embeddings=4096)
    engine = {"kv_cache_tokens": 1 << 15, "block_size": 4, **OPTIONS}
    common = {"model": str(model), "engine": engine, "server": {"max_body_bytes": 4000}, "num_cpus": 0.4}
    quick = {"upscale_delay_s": 1, "downscale_delay_s": 1, "look_back_period_s": 2, "metrics_interval_s": 0.5}
    scaled = {"max_replicas": 2, "target_ongoing_requests": 2, "autoscaling": quick}
    apps = {"fixed": {**common, "min_replicas": 2}, "scaled": {**common, **scaled}}
    config = {
        "http_options": {"port": free_port()},
        "applications": [
            {"name": name, "route_prefix": f"/{name}", "import_path": "nanovllm.cluster.ray_serve:app", "args": args}
            for name, args in apps.items()
        ],
    }
    file = folder / "config.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_SERVE_LOG_TO_STDERR": "0"}
    command = [str(Path(sys.executable).with_name("serve")), "run", str(file)]
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment) as process:
        try:
            CLIENT.base_url = f"http://127.0.0.1:{config['http_options']['port']}"
            until(lambda: all(map(is_ready, apps)) or process.poll() is not None)
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def is_ready(app: str) -> bool:
    try:
        return CLIENT.get(f"/{app}/health").status_code == 200
    except httpx.HTTPError:
        return False


def complete(app: str, prompt: str) -> httpx.Response:
    return CLIENT.post(f"/{app}/v1/completions", json={"prompt": prompt, **FEW})


class Stream:
    """A stream that a thread reads until it ends."""

    def __init__(self, pool: ThreadPoolExecutor, app: str, prompt: str) -> None:
        self.replica, self.events = "", []
        self._reading = pool.submit(self._read, app, prompt)

    def _read(self, app: str, prompt: str) -> None:
        with CLIENT.stream("POST", f"/{app}/v1/completions", json={"prompt": prompt, **LONG}) as response:
            assert response.status_code == 200
            self.replica = response.headers["x-replica"]
            self.events.extend(line for line in response.iter_lines() if line)

    def is_whole(self) -> bool:
        """Wait for the end. Return False if it is an error, which nothing may follow."""
        self._reading.result(120)
        *events, last = [json.loads(event[6:]) if event != "data: [DONE]" else None for event in self.events]
        assert all(event["choices"] for event in events), "no error before the end"
        assert (last is None) == (events[-1]["choices"][0]["finish_reason"] == "length")
        assert last is None or last["error"]["type"] == "server_error"
        return last is None


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as pool:
        yield pool


def prompts(count: int) -> list[str]:
    """Return prompts that have nothing in common, each longer than a few of the router's chunks."""
    rng = random.Random(count)
    return ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=400)) for _ in range(count)]


def test_each_prefix_stays_on_its_replica(process):
    replicas: dict[str, set[str]] = {prompt: set() for prompt in prompts(8)}
    for turn in range(4):
        for prompt in random.Random(turn).sample([*replicas], 8):
            response = complete("fixed", f"{prompt} turn {turn}")
            details = response.json()["usage"]["prompt_tokens_details"]
            assert details["cached_tokens"] >= (300 if turn else 0), "a letter is a token"
            replicas[prompt].add(response.headers["x-replica"])
    assert all(len(names) == 1 for names in replicas.values())
    assert len(set.union(*replicas.values())) == 2


def test_body_that_is_too_large_is_refused(process):
    response = complete("fixed", "a" * 4000)
    assert response.status_code == 413 and "at most 4,000" in response.json()["error"]["message"]


def test_killed_replica_loses_only_its_streams(process, pool):
    [streams, before] = [
        [Stream(pool, "fixed", prompt) for prompt in prompts(6)],
        titled(process.pid, REPLICA.format("fixed")),
    ]
    until(lambda: all(stream.replica for stream in streams))
    time.sleep(0.2)
    engine = next(iter(descendants(before[0])))
    os.kill(before[0], signal.SIGKILL)
    whole = {True: set(), False: set()}
    for stream in streams:
        whole[stream.is_whole()].add(stream.replica)
    assert len(whole[True]) == len(whole[False]) == 1 and whole[True] != whole[False]
    assert complete("fixed", "the fox").status_code == 200
    until(lambda: len({*titled(process.pid, REPLICA.format("fixed"))} - {before[0]}) == 2)
    until(lambda: not Path(f"/proc/{engine}").exists(), 10)


def test_replica_whose_engine_dies_is_replaced(process, pool):
    [first, *_] = before = titled(process.pid, REPLICA.format("fixed"))
    os.kill(titled(first, "spawn_main")[0], signal.SIGKILL)
    until(lambda: first not in (now := titled(process.pid, REPLICA.format("fixed"))) and len(now) == len(before))
    until(lambda: all(complete("fixed", prompt).status_code == 200 for prompt in prompts(4)))


def test_client_that_hangs_up_aborts_its_request(process):
    with CLIENT.stream("POST", "/scaled/v1/completions", json={"prompt": "the fox", **LONG}) as response:
        lines = response.iter_lines()  # httpx closes the response with it
        next(lines)
        assert num_running() == 1
    until(lambda: num_running() == 0, 2)


def num_running() -> int:
    """Return the number of running requests of the only replica."""
    lines = CLIENT.get("/scaled/metrics").text.splitlines()
    return int(float(next(line for line in lines if line.startswith("vllm:num_requests_running")).split()[-1]))


def test_replicas_follow_the_queue_and_finish_their_streams_before_they_stop(process, pool):
    streams = [Stream(pool, "scaled", prompt) for prompt in prompts(4)]
    until(lambda: len(titled(process.pid, REPLICA.format("scaled"))) == 2)
    waiting = []
    while not {stream.replica for stream in waiting} - {stream.replica for stream in streams}:
        waiting.append(Stream(pool, "scaled", f"the fox {len(waiting)}"))
        time.sleep(0.5)
    assert all(stream.is_whole() for stream in [*streams, *waiting])
    until(lambda: len(titled(process.pid, REPLICA.format("scaled"))) == 1)
