"""python -m stages.bench published: nano-vllm's workload, a peer that may be slow or missing, and its worker."""

import json
import re
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from nanovllm.bench import floor
from nanovllm.bench.engine import Run
from nanovllm.bench.workload import Task
from nanovllm.checkpoints.model_config import read_model_config
from nanovllm.checkpoints.sizes import SHAPES
from nanovllm.tests.testing.checkpoints import CONFIG
from nanovllm.tests.testing.engines import UNMEASURED
from stages.bench import peers, with_transformers
from stages.bench.__main__ import main
from stages.bench.models import folder_of_shape
from stages.bench.options import Published
from stages.bench.workers import serve_transformers
from stages.bench.workloads import published_tasks
from tests.fake_peer import ANSWERS, write_fake_peer

SMALL = ("--num-requests", "3", "--min-len", "4", "--max-len", "9")
CUT = ANSWERS.replace("[7] * n", "[7] * (n // 2)").replace("range(n)]", "range(n // 2)]")


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    monkeypatch.setattr(floor, "NUM_BYTES", 1 << 20)


@pytest.fixture
def serve(run, tmp_path, monkeypatch):
    """Return a function that runs the benchmark beside a peer with this code, and returns the report and the table."""

    def command(code: str = ANSWERS, ready: str = 'write(version="9.9 (fake)")') -> tuple[dict, str]:
        fake = peers.PeerSpec("transformers", write_fake_peer(tmp_path, code, ready))
        monkeypatch.setattr(with_transformers, "TRANSFORMERS", fake)
        file = tmp_path / "report.json"
        status, out, err = run("published", *SMALL, "--json", str(file))
        report = json.loads(file.read_text())
        speed = report["measured"]["nanovllm"]["tokens_per_second"]
        assert (status, err) == (0, f"nanovllm: {speed:,.1f} tokens per second\n"), "even if the peer is stopped"
        return report, out

    return command


def test_workload_is_the_published_one():
    tasks = published_tasks(151_936, 256, 100, 1024, 0.6)
    totals = sum(len(task.prompt) for task in tasks), sum(task.num_output_tokens for task in tasks)
    assert totals == (142_827, 133_966) and {task.temperature for task in tasks} == {0.6}
    assert max(max(task.prompt) for task in tasks) == 10_000


def test_both_engines_serve_the_workload_once(serve):
    report, table = serve()
    ours, theirs = report["measured"]["nanovllm"], report["measured"]["generate_batch"]
    assert (ours["tokens"], report["settings"]["prompt_tokens"]) == (theirs["tokens"], 18)
    longest = max(task.num_output_tokens for task in published_tasks(320, 3, 4, 9, 0.6))
    assert theirs["seconds"] == 0.5 + 0.25 * (longest - 1), "as the fake one claims"
    assert theirs["nanovllm's speedup"]["median"] == ours["tokens_per_second"] / theirs["tokens_per_second"]
    shares = [each["floor_share"] * each["seconds"] for each in (ours, theirs)]
    assert shares[0] == pytest.approx(shares[1]) and 0 < ours["floor_share"] < 1
    assert report["machine"]["generate_batch"] == "9.9 (fake)" and "stopped" not in table


def test_stopped_peer_has_the_speed_of_its_tokens(serve):
    report, table = serve(CUT)
    numbers = report["measured"]["generate_batch"]
    assert 0 < numbers["tokens"] < report["measured"]["nanovllm"]["tokens"]
    assert numbers["tokens_per_second"] == numbers["tokens"] / numbers["seconds"]
    assert re.search(r"generate_batch was stopped after \d+ seconds, with \d+ of \d+ tokens", table)


@pytest.mark.parametrize(
    ("code", "ready", "expected"),
    [
        ("", 'write(error="OutOfMemoryError: 3 GiB")', "transformers-batch: OutOfMemoryError: 3 GiB"),
        (
            ANSWERS.replace("[7] * n", "[]").replace("range(n)]", "()]"),
            'write(version="1")',
            "no token arrived within 240 s",
        ),
        (
            ANSWERS.replace("[7] * n", "[7] * (n + 1)"),
            'write(version="1")',
            "tokens for request 0",
        ),
    ],
)
def test_engine_is_measured_beside_a_peer_that_fails(serve, code, ready, expected):
    report, table = serve(code, ready)
    assert [*report["measured"]] == ["nanovllm"] and re.search(f"\ngenerate_batch: .*{expected}", table)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--shape", "qwen3-0.6b"], "--shape qwen3-0.6b and --model "),
        (["--min-len", "9", "--max-len", "8"], "--min-len must be at most --max-len 8, got 9"),
        (["--min-len", "40", "--max-len", "40"], "40 + 40 tokens, but max_model_len is 64"),
        (["--model", "no/such/folder/here"], "no/such/folder/here"),
        (["--peer-seconds", "0"], "'--peer-seconds'"),
    ],
)
def test_invalid_option_is_a_one_line_error(run, flags, expected):
    status, out, err = run("published", "--no-peer", *SMALL, *flags)
    assert (status, out) == (2, "") and err.startswith("error: ") and expected in err and err.count("\n") == 1


def test_floor_counts_the_tokens_that_were_generated():
    run = Run([[5, 6, 7], [8, 9]], [[1.0, 2.0, 3.0], [1.0, 2.0]], num_steps=5)
    tasks, bytes_read = [Task([1, 2, 3], 9), Task([4], 2)], floor.Floor(step_bytes=1000, slot_bytes=10)
    measured = with_transformers.scores([{"nanovllm": run}], tasks, bytes_read, bandwidth=1e6)
    slots = 4 + 5 + 2  # the tokens before each but the first of an output
    assert measured["nanovllm"]["floor_share"] * 3.0 * 1e6 == pytest.approx(5 * 1000 + slots * 10)


# A shape, without its weights


@pytest.mark.parametrize("name", SHAPES)
def test_folder_of_a_shape_is_read_as_that_shape(name):
    config = asdict(read_model_config(folder_of_shape(name)))
    assert {key: config[key] for key in asdict(SHAPES[name])} == asdict(SHAPES[name])


@pytest.mark.full
def test_shape_is_served_with_random_weights(capsys, monkeypatch):
    flags = "--num-requests", "1", "--min-len", "2", "--max-len", "2", "--kv-cache-tokens", "64", *UNMEASURED
    assert main(["published", "--shape", "smollm2-135m", "--no-peer", *flags]) == 0
    out, err = capsys.readouterr()
    assert "model random smollm2-135m" in out and err.startswith("nanovllm: ")


@pytest.mark.nightly
@pytest.mark.parametrize("seconds", [240.0, 1e-9])
def test_transformers_serves_random_weights(tmp_path, seconds):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    engine = {"model": str(tmp_path), "load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu"}
    report = with_transformers.published(
        engine, Published(peer_seconds=seconds, num_requests=3, min_len=20, max_len=30)
    )
    is_whole = seconds > 1
    assert ("generate_batch" in report["measured"]) == is_whole, report["says"]
    assert any("no token arrived within 1e-09 seconds" in line for line in report["says"]) != is_whole
    assert not is_whole or report["machine"]["generate_batch"].endswith("(sdpa)")


# The worker


def result(id: str, tokens: int, times: list[float], error: str | None = None, is_finished: bool = True):
    given = {"request_id": id, "generated_tokens": [7] * tokens, "timestamps": times, "error": error}
    return SimpleNamespace(**given, is_finished=lambda: is_finished)


class FakeManager:
    """A manager with results, and more when it is stopped."""

    def __init__(self, results: list, when_stopped: list | None = None) -> None:
        self.results, self.when_stopped, self.is_stopped = results, when_stopped, False

    def get_result(self, timeout: float):
        return self.results.pop(0) if self.results else None

    def is_running(self) -> bool:
        return False

    def stop(self, block: bool, timeout: float, hard_stop: bool) -> None:
        assert block and hard_stop
        self.results, self.is_stopped = self.results + (self.when_stopped or []), True


def test_job_ends_with_its_time_and_keeps_its_tokens():
    manager = FakeManager([], [result("a", 2, [1.0, 2.0], error="it was stopped"), result("b", 0, [])])
    done = serve_transformers.results(manager, 3, max_seconds=0.0)
    assert manager.is_stopped and {name: len(each.generated_tokens) for name, each in done.items()} == {"a": 2, "b": 0}


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([result("a", 1, [1.0])], "ended after 1 of 2 requests"),
        ([result("a", 0, [], error="no memory")], "continuous batching: no memory"),
    ],
)
def test_failure_before_the_time_is_over_raises(results, expected):
    with pytest.raises(RuntimeError, match=expected):
        serve_transformers.results(FakeManager(results), 2, max_seconds=None)


def test_tokens_of_an_evicted_request_have_times():
    times_of = serve_transformers.times_of
    assert times_of(result("a", 2, [11.0, 12.0]), 10.0) == [1.0, 2.0]
    assert times_of(result("a", 4, [11.0, 12.0]), 10.0) == [1.0, 1.0, 1.0, 2.0]
    assert times_of(result("a", 0, []), 10.0) == []
