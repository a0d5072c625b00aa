"""Batches on Ray Data: `nanovllm batch --ray` and BatchLLM, on a local cluster with two actors, some of them killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ... import LLM, SamplingParams
from ..testing.engines import OPTIONS, UNMEASURED
from ..testing.processes import REPOSITORY, titled, until

pytest.importorskip("ray")
pytestmark = pytest.mark.nightly
NUM_REQUESTS = 1200
ACTOR = "ray::MapWorker"


@pytest.fixture(scope="module")
def requests(tmp_path_factory) -> Path:
    """Write requests without seeds, with texts that begin alike, and one that cannot be served."""
    requests = [{"id": f"r{i}", "prompt": f"the fox {i % 7}", "max_tokens": 1 + i % 40} for i in range(NUM_REQUESTS)]
    lines = [{**request, "temperature": 1.0, "ignore_eos": True} for request in requests]
    file = tmp_path_factory.mktemp("requests") / "requests.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"id": "long", "prompt": [5] * 100}]))
    return file


@pytest.fixture(scope="module")
def expected(checkpoint, requests, tmp_path_factory) -> dict[str, object]:
    """Return the results of a run without Ray."""
    out = tmp_path_factory.mktemp("expected") / "results.jsonl"
    assert start(checkpoint, requests, out).wait(300) == 1
    return answers(out)


def start(checkpoint: Path, requests: Path, out: Path, *flags: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "nanovllm", "batch", str(requests), "--output", str(out), *UNMEASURED]
    return subprocess.Popen([*command, "--model", str(checkpoint), *flags], cwd=REPOSITORY)


def on_ray(*arguments: Path) -> subprocess.Popen:
    return start(*arguments, "--resume", "--ray", "--data-parallel-size", "2")


def num_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def answers(file: Path) -> dict[str, object]:
    """Return the outputs, or the error, of each request. No id may occur twice."""
    results = [json.loads(line) for line in file.read_text().splitlines()]
    outputs = {each["id"]: each.get("error") or [out["token_ids"] for out in each["outputs"]] for each in results}
    assert len(outputs) == len(results)
    return outputs


def test_killed_actors_are_replaced_and_nothing_is_lost_or_doubled(checkpoint, requests, expected, tmp_path):
    out, killed = tmp_path / "out.jsonl", []
    command = on_ray(checkpoint, requests, out)
    for count in (1, 400):
        until(lambda count=count: num_lines(out) >= count or command.poll() is not None)
        assert command.poll() is None, "it has ended before the kill"
        until(lambda: len({*titled(command.pid, ACTOR)} - {*killed}) == 2)
        killed.append(next(each for each in titled(command.pid, ACTOR) if each not in killed))
        os.kill(killed[-1], signal.SIGKILL)
    assert command.wait(300) == 1, "one request cannot be served"
    assert answers(out) == expected


def test_interrupted_run_is_resumed(checkpoint, requests, expected, tmp_path):
    out = tmp_path / "out.jsonl"
    for number in (signal.SIGINT, signal.SIGKILL):
        before, command = num_lines(out), on_ray(checkpoint, requests, out)
        until(lambda before=before: num_lines(out) > before)
        command.send_signal(number)
        assert command.wait(60) == {signal.SIGINT: 130, signal.SIGKILL: -9}[number]
        assert before < num_lines(out) < NUM_REQUESTS
    assert on_ray(checkpoint, requests, out).wait(300) == 1
    assert answers(out) == expected


@pytest.fixture
def cluster():
    import ray

    ray.init(num_cpus=2, object_store_memory=200_000_000, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def test_classes_for_map_batches_hold_an_engine_in_each_actor(cluster, checkpoint):
    from ...cluster.ray_data import BatchLLM

    class Usual:  # as Ray's documentation writes it: Ray calls it in another thread than it builds it in
        def __init__(self, model):
            self.llm = LLM(model, **OPTIONS)

        def __call__(self, batch):
            outputs = self.llm.generate(list(batch["prompt"]), params, use_tqdm=False)
            return {
                **batch,
                "text": [output.outputs[0].text for output in outputs],
                "pid": [os.getpid()] * len(outputs),
            }

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [f"the fox {i}" for i in range(64)]
    expected = {each.prompt: each.outputs[0].text for each in LLM(checkpoint, **OPTIONS).generate(prompts, params)}
    dataset = cluster.data.from_items([{"prompt": prompt} for prompt in prompts], override_num_blocks=8)
    usual = dataset.map_batches(Usual, fn_constructor_args=(checkpoint,), batch_size=4, concurrency=2).take_all()
    assert {row["prompt"]: row["text"] for row in usual} == expected and len(usual) == 64

    options = {"model": checkpoint, "sampling_params": params, **OPTIONS}
    ours = dataset.map_batches(BatchLLM, fn_constructor_kwargs=options, batch_size=4, concurrency=2).take_all()
    assert {row["prompt"]: row["text"] for row in ours} == expected and len(ours) == 64
    assert all(len(row["token_ids"]) == 8 and row["finish_reason"] == "length" and row["error"] is None for row in ours)
