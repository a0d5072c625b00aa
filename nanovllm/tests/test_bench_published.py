"""nanovllm bench published: the workload as it was published, a peer that may be slow or missing, and its worker."""

import json
import re
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from ..__main__ import main
from ..checkpoints.model_config import read_model_config
from ..checkpoints.sizes import SHAPES
from ..cli.benchmarks import floor, published
from ..cli.benchmarks.answers import Answer
from ..cli.benchmarks.published_load import Load, published_tasks
from ..cli.benchmarks.shapes import folder_of_shape
from ..cli.benchmarks.workers import serve_transformers_batch
from ..cli.benchmarks.workload import Task
from ..engine.config import EngineConfig
from ..engine.kv_cache import bytes_per_token
from .fake_peer import ANSWERS, write_fake_peer
from .helpers import CONFIG, UNMEASURED

SMALL = ("--num-requests", "3", "--min-len", "4", "--max-len", "9")
CUT = ANSWERS.replace("[7] * n", "[7] * (n // 2)").replace("range(n)]", "range(n // 2)]")


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    monkeypatch.setattr(floor, "MAX_BYTES", 1 << 20)


@pytest.fixture
def serve(run, tmp_path, monkeypatch):
    """serve(code) is (the numbers, the table) beside a peer that runs `code`."""

    def command(code: str = ANSWERS, ready: str = 'say(version="9.9 (fake)")') -> tuple[dict, str]:
        python = SimpleNamespace(executable=write_fake_peer(tmp_path, code, ready))
        monkeypatch.setattr(published, "sys", python)
        file = tmp_path / "found.json"
        status, out, err = run("bench published", *SMALL, "--json", str(file))
        found = json.loads(file.read_text())
        speed = found["measured"].get("generate_batch", {}).get("tokens_per_second")
        assert (status, err) == (0, f"generate_batch: {speed:,.1f} tokens a second\n" if speed else "")
        return found, out

    return command


def test_the_workload_is_the_published_one():
    tasks = published_tasks(151_936, 256, 100, 1024, 0.6)
    totals = sum(len(task.prompt) for task in tasks), sum(task.num_tokens for task in tasks)
    assert totals == (142_827, 133_966) and {task.temperature for task in tasks} == {0.6}
    assert max(max(task.prompt) for task in tasks) == 10_000


def test_both_serve_it_once_and_the_ratio_is_of_tokens_a_second(serve):
    found, table = serve()
    ours, theirs = found["measured"]["nanovllm"], found["measured"]["generate_batch"]
    assert (ours["tokens"], found["settings"]["prompt_tokens"]) == (theirs["tokens"], 18)
    longest = max(task.num_tokens for task in published_tasks(320, 3, 4, 9, 0.6))
    assert theirs["seconds"] == 0.5 + 0.25 * (longest - 1), "as the fake one says"
    assert theirs["nanovllm is times as fast"] == ours["tokens_per_second"] / theirs["tokens_per_second"]
    shares = [each["share of the floor"] * each["seconds"] for each in (ours, theirs)]
    assert shares[0] == pytest.approx(shares[1]) and 0 < ours["share of the floor"] < 1
    assert found["machine"]["generate_batch"] == "9.9 (fake)" and "stopped" not in table


def test_a_peer_that_is_stopped_has_the_speed_of_what_it_made(serve):
    found, table = serve(CUT)
    numbers = found["measured"]["generate_batch"]
    assert 0 < numbers["tokens"] < found["measured"]["nanovllm"]["tokens"]
    assert numbers["tokens_per_second"] == numbers["tokens"] / numbers["seconds"]
    assert re.search(r"generate_batch was stopped after \d+ seconds, with \d+ of \d+ tokens", table)


@pytest.mark.parametrize(
    ("code", "ready", "says"),
    [
        ("", 'say(error="OutOfMemoryError: 3 GiB")', "transformers-batch: OutOfMemoryError: 3 GiB"),
        (
            ANSWERS.replace("[7] * n", "[]").replace("range(n)]", "()]"),
            'say(version="1")',
            "no token came within 240 s",
        ),
        (
            ANSWERS.replace("[7] * n", "[7] * (n + 1)"),
            'say(version="1")',
            "other numbers of tokens than were asked for",
        ),
    ],
)
def test_a_peer_that_fails_is_told_and_the_engine_is_measured(serve, code, ready, says):
    found, table = serve(code, ready)
    assert [*found["measured"]] == ["nanovllm"] and re.search(f"\ngenerate_batch: .*{says}", table)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--shape", "qwen3-0.6b"], "--shape qwen3-0.6b and --model "),
        (["--min-len", "9", "--max-len", "8"], "--min-len 9 is above --max-len 8"),
        (["--min-len", "40", "--max-len", "40"], "a prompt and its output have 80 tokens: max_model_len is 64"),
        (["--model", "no/such/folder/here"], "there is no folder"),
        (["--peer-seconds", "0"], "Invalid value for '--peer-seconds'"),
    ],
)
def test_a_mistake_is_one_line(run, flags, says):
    status, out, err = run("bench published", "--no-peer", *SMALL, *flags)
    assert (status, out) == (2, "") and err.startswith(f"error: {says}") and err.count("\n") == 1


def test_the_floor_is_of_the_tokens_that_were_made(checkpoint):
    model = read_model_config(checkpoint)
    load = Load(EngineConfig(max_num_seqs=1), model, [Task([1, 2, 3], 9), Task([4], 2)])
    answer = Answer([[5, 6, 7], [8, 9]], [[1.0, 2.0, 3.0], [1.0, 2.0]])
    steps, slots = 3 + 2, 4 + 5 + 2  # one at a time; the tokens before each but the first of an output
    weights = floor.weights_read(model) * 4
    assert load.floor_bytes(answer) == steps * weights + slots * bytes_per_token(model, load.dtype)


# A shape, without its weights


@pytest.mark.parametrize("name", SHAPES)
def test_a_folder_of_a_shape_is_read_as_that_shape(name):
    config = asdict(read_model_config(folder_of_shape(name)))
    assert {key: config[key] for key in asdict(SHAPES[name])} == asdict(SHAPES[name])


@pytest.mark.full
def test_a_shape_is_served_with_random_weights(capsys, monkeypatch):
    flags = "--num-requests", "1", "--min-len", "2", "--max-len", "2", "--kv-cache-tokens", "64", *UNMEASURED
    assert main(["bench", "published", "--shape", "smollm2-135m", "--no-peer", *flags]) == 0
    out, err = capsys.readouterr()
    assert "model random smollm2-135m" in out and err == ""


@pytest.mark.full
@pytest.mark.parametrize("seconds", [240.0, 1e-9])
def test_transformers_of_this_environment_serves_random_weights(tmp_path, seconds):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    engine = {"model": str(tmp_path), "load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu"}
    found = published.measure(engine, True, seconds, num_requests=3, min_len=20, max_len=30, temperature=0.6)
    is_whole = seconds > 1
    assert ("generate_batch" in found["measured"]) == is_whole, found["says"]
    assert any("no token came within 1e-09 seconds" in line for line in found["says"]) != is_whole
    assert not is_whole or found["machine"]["generate_batch"].endswith("(sdpa)")


# Its worker


def result(id: str, tokens: int, times: list[float], error: str | None = None, is_finished: bool = True):
    given = {"request_id": id, "generated_tokens": [7] * tokens, "timestamps": times, "error": error}
    return SimpleNamespace(**given, is_finished=lambda: is_finished)


class FakeManager:
    """Results as they come; the rest when it is stopped."""

    def __init__(self, results: list, when_stopped: list | None = None) -> None:
        self.results, self.when_stopped, self.is_stopped = results, when_stopped, False

    def get_result(self, timeout: float):
        return self.results.pop(0) if self.results else None

    def is_running(self) -> bool:
        return False

    def stop(self, block: bool, timeout: float, hard_stop: bool) -> None:
        assert block and hard_stop
        self.results, self.is_stopped = self.results + (self.when_stopped or []), True


def test_a_job_ends_when_its_time_is_over_with_what_there_is():
    manager = FakeManager([], [result("a", 2, [1.0, 2.0], error="it was stopped"), result("b", 0, [])])
    found = serve_transformers_batch.results(manager, 3, max_seconds=0.0)
    assert manager.is_stopped and {name: len(each.generated_tokens) for name, each in found.items()} == {"a": 2, "b": 0}


@pytest.mark.parametrize(
    ("results", "says"),
    [
        ([result("a", 1, [1.0])], "ended after 1 of 2 requests"),
        ([result("a", 0, [], error="no memory")], "continuous batching: no memory"),
    ],
)
def test_what_goes_wrong_before_is_an_error(results, says):
    with pytest.raises(RuntimeError, match=says):
        serve_transformers_batch.results(FakeManager(results), 2, max_seconds=None)


def test_each_token_has_a_time_even_if_its_request_was_evicted():
    times_of = serve_transformers_batch.times_of
    assert times_of(result("a", 2, [11.0, 12.0]), 10.0) == [1.0, 2.0]
    assert times_of(result("a", 4, [11.0, 12.0]), 10.0) == [1.0, 1.0, 1.0, 2.0]
    assert times_of(result("a", 0, []), 10.0) == []
