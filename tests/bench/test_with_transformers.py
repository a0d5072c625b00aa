"""python -m stages.bench throughput, latency and prefix: transformers serves the same tasks."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM
from nanovllm.bench import floor
from nanovllm.bench.engine import serve
from nanovllm.bench.workload import Task, random_tasks
from nanovllm.tests.testing.checkpoints import write_checkpoint
from nanovllm.tests.testing.engines import OPTIONS
from stages.bench import peers, with_transformers
from tests.fake_peer import write_fake_peer

SMALL = ("--input-len", "6", "--output-len", "3", "--rounds", "2")
PREFIX = ("--prefix-len", "32", "--input-len", "4", "--output-len", "2", "--rounds", "2", "--block-size", "4")
Bench = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def bench(run: Any, tmp_path: Path) -> Bench:
    """Return a function that runs a benchmark, and returns the report and the table."""

    def command(name: str, *flags: str) -> tuple[dict[str, Any], str]:
        file = tmp_path / "report.json"
        status, out, err = run(name, "--json", str(file), *flags)
        assert (status, err) == (0, "")
        return json.loads(file.read_text()), out

    return command


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    monkeypatch.setattr(floor, "NUM_BYTES", 1 << 20)


@pytest.mark.parametrize("name", ["throughput", "latency", "prefix"])
def test_transformers_serves_the_same_tasks(bench, name, tmp_path, monkeypatch):
    monkeypatch.setattr(with_transformers, "TRANSFORMERS", peers.PeerSpec("transformers", write_fake_peer(tmp_path)))
    flags = PREFIX if name == "prefix" else SMALL
    report, table = bench(name, *flags, *(("--spread", "0.5") if name == "throughput" else ()))
    numbers = report["measured"]["transformers"]
    assert numbers["seconds"] >= 0.5 and numbers["first_token_ms"]["p50"] == 500.0, "as the fake one claims"
    if name != "prefix":
        assert numbers["nanovllm's speedup"]["median"] > 0 and re.search(r"\n *nanovllm's speedup +- +[\d.]+ / ", table)


@pytest.mark.full
def test_transformers_generates_the_tokens_that_a_padded_batch_needs(checkpoint):
    llm = LLM(checkpoint, **OPTIONS)
    tasks = random_tasks(320, 3, 12, 8, spread=0.5)
    with with_transformers.transformers(llm, tasks) as (calls, says):
        theirs = calls["transformers"]()
    assert theirs.tokens == serve(llm, tasks).tokens and says == []


@pytest.mark.nightly
def test_transformers_ignores_the_checkpoints_generation_config(tmp_path):
    """A penalty would be work that only one of the two engines does."""
    folder = write_checkpoint(tmp_path)
    (folder / "generation_config.json").write_text('{"repetition_penalty": 1.5, "temperature": 0.1, "eos_token_id": 2}')
    llm, tasks = LLM(folder, **OPTIONS), [Task([5, 6, 7], 20)]
    with with_transformers.transformers(llm, tasks) as (calls, _):
        assert calls["transformers"]().tokens == serve(llm, tasks).tokens


@pytest.mark.parametrize(
    ("ready", "expected"),
    [(None, "transformers is not installed"), ('write(error="ImportError: no torch")', "ImportError: no torch")],
)
def test_engine_is_measured_without_transformers(run, monkeypatch, tmp_path, ready, expected):
    if ready is None:
        monkeypatch.setattr(with_transformers, "find_spec", lambda name: None)
    else:
        fake = write_fake_peer(tmp_path, "", ready)
        monkeypatch.setattr(with_transformers, "TRANSFORMERS", peers.PeerSpec("transformers", fake))
    status, out, _ = run("latency", *SMALL)
    assert status == 0 and expected in out
