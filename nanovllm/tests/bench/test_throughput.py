"""nanovllm bench throughput, latency, prefix and offload: tables and JSON of a tiny checkpoint."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ... import LLM
from ...__main__ import main
from ...bench import floor
from ...bench.engine import Run, serve, summarize_runs
from ...bench.workload import Task, random_tasks, read_dataset
from ...checkpoints.weights import load_model
from ..testing.checkpoints import write_checkpoint
from ..testing.engines import OPTIONS

SMALL = ("--input-len", "6", "--output-len", "3", "--rounds", "2")
PREFIX = ("--prefix-len", "32", "--input-len", "4", "--output-len", "2", "--rounds", "2", "--block-size", "4")
Bench = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def bench(run: Any, tmp_path: Path) -> Bench:
    """Return a function that runs a benchmark, and returns the report and the table."""

    def command(name: str, *flags: str) -> tuple[dict[str, Any], str]:
        file = tmp_path / "report.json"
        status, out, err = run(f"bench {name}", "--json", str(file), *flags)
        assert (status, err) == (0, "")
        return json.loads(file.read_text()), out

    return command


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    monkeypatch.setattr(floor, "NUM_BYTES", 1 << 20)


def test_throughput_prints_a_table_and_writes_json(bench, checkpoint):
    report, table = bench("throughput", "--num-prompts", "3", *SMALL)
    numbers = report["measured"]["nanovllm"]
    assert report["settings"] == {"num_prompts": 3, "input_len": 6, "output_len": 3, "spread": 0.0, "rounds": 2}
    assert (report["machine"]["model"], report["machine"]["dtype"]) == (str(checkpoint), "float32")
    assert numbers["steps"] == 3 and numbers["tokens_per_second"] > 0 and 0 < numbers["floor_share"] < 1
    for name in ("first_token_ms", "between_tokens_ms"):
        assert 0 < numbers[name]["p50"] <= numbers[name]["p90"] <= numbers[name]["p99"]
    assert re.search(r"\n *tokens per second +[\d.,]+\n", table) and table.startswith("throughput: ")


def test_throughput_serves_prompts_from_a_file(bench, tmp_path):
    (tmp_path / "prompts.txt").write_text("the fox\n\nthe wood and the fox\n")
    report, _ = bench("throughput", "--prompts", str(tmp_path / "prompts.txt"), *SMALL)
    assert report["settings"]["num_prompts"] == 2 and report["measured"]["nanovllm"]["steps"] == 3


def test_throughput_serves_a_dataset(bench, tmp_path):
    (tmp_path / "requests.jsonl").write_text('{"prompt": "the fox", "output_tokens": 5}\n\n{"prompt": "the wood"}\n')
    report, _ = bench("throughput", "--dataset-path", str(tmp_path / "requests.jsonl"), *SMALL)
    numbers = report["measured"]["nanovllm"]
    assert report["settings"]["num_prompts"] == 2 and "input_len" not in report["settings"]
    assert numbers["steps"] == 5, "the first request has five tokens, the second one those of --output-len"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "has no request"),
        ('{"prompt": "a"}\nfox', "line 2: expected {\"prompt\": ...}, got 'fox'"),
        ('{"text": "a"}', 'line 1: expected {"prompt": ...}'),
        ('["a"]', "line 1: expected"),
        ("[" * 100_000, "line 1: expected"),
        ('{"prompt": ["a"]}', "line 1: prompt must be a string of at least 1 character, got ['a']"),
        ('{"prompt": "a", "output_tokens": 0}', "line 1: output_tokens must be an integer, at least 1, got 0"),
        ('{"prompt": "a", "output_tokens": true}', "got True"),
    ],
)
def test_invalid_dataset_is_a_one_line_error(run, tmp_path, text, expected):
    file = tmp_path / "requests.jsonl"
    file.write_text(text)
    status, out, err = run("bench throughput", "--dataset-path", str(file))
    assert (status, out) == (2, "") and expected in err and str(file) in err and err.count("\n") == 1


def test_binary_dataset_is_a_one_line_error(run, tmp_path):
    file = tmp_path / "requests.jsonl.gz"
    file.write_bytes(b"\x1f\x8b\x08\0\0\0\0\0\n")
    status, out, err = run("bench throughput", "--dataset-path", str(file))
    assert (status, out) == (2, "") and err.startswith(f"error: {file}, line 1: expected ") and err.count("\n") == 1
    assert err.rstrip("\n").isprintable()


def test_dataset_has_a_request_per_line_whatever_its_text(tmp_path):
    """JSON allows these separators in a string, and Python's own splitlines() would split there."""
    (tmp_path / "requests.jsonl").write_text('{"prompt": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert read_dataset(str(tmp_path / "requests.jsonl"), 7) == [("a\u2028b\x85c", 7)]


def test_prompts_and_a_dataset_exclude_each_other(run, tmp_path):
    (tmp_path / "a").write_text("the fox\n")
    flags = ("--prompts", str(tmp_path / "a"), "--dataset-path", str(tmp_path / "a"))
    status, _, err = run("bench throughput", *flags)
    assert status == 2 and "must not both be set" in err


def test_latency_serves_a_few_requests(bench):
    report, _ = bench("latency", "--batch-size", "2", *SMALL)
    assert report["settings"]["batch_size"] == "2" and report["measured"]["nanovllm"]["steps"] == 3


def test_latency_has_percentiles_for_each_batch_size(bench):
    report, table = bench("latency", "--batch-size", "1,3", *SMALL)
    assert [*report["measured"]] == ["nanovllm, batch 1", "nanovllm, batch 3"]
    assert [numbers["tokens"] for numbers in report["measured"].values()] == [3, 9]
    for numbers in report["measured"].values():
        assert [*numbers["between_tokens_ms"]] == ["p50", "p90", "p99"] and numbers["floor_share"] > 0
    assert "p50 / p90 / p99" in table and re.search(r"\n *between tokens ms( +[\d.]+ / [\d.]+ / [\d.]+){2}\n", table)


@pytest.mark.parametrize("sizes", ["0", "1,x", "-1", ",", "1,1"])
def test_batch_size_must_be_whole_numbers(run, sizes):
    status, out, err = run("bench latency", "--batch-size", sizes)
    assert (status, out) == (2, "") and "--batch-size must " in err and err.count("\n") == 1


def test_prefix_hits_a_cached_beginning(bench):
    report, table = bench("prefix", *PREFIX)
    hits = {name: numbers["tokens_hit"] for name, numbers in report["measured"].items()}
    assert hits == {"new": 0, "cached": 32} and report["sooner"]["median"] > 0 and "times as soon" in table


def test_offload_loads_a_beginning_from_the_host(bench):
    report, table = bench("offload", *PREFIX)
    numbers = report["measured"]
    hits = {name: each["tokens_hit"] for name, each in numbers.items()}
    on_disk = {"on the disk": 32, "on the disk, not in memory": 32}
    assert hits == {"computed": 0, "on the device": 32, "on the host": 32} | on_disk
    assert all(numbers[name]["blocks_loaded"] == 8 for name in on_disk) and "sooner_from_disk" in report
    assert numbers["on the device"]["blocks_loaded"] == 0 < numbers["on the host"]["blocks_loaded"] <= 8
    assert report["auto"] in ("load", "compute again") and "GB/s" in table


def test_offload_reports_a_pool_that_sends_nothing_to_the_host(bench):
    _, table = bench("offload", *PREFIX, "--kv-cache-tokens", "4096")
    assert "nothing went to the host" in table


def test_json_goes_to_standard_output_and_the_table_to_standard_error(run):
    status, out, err = run("bench latency", "--json", "-", *SMALL)
    assert status == 0 and json.loads(out)["bench"] == "latency" and err.startswith("latency: ")


def test_speed_and_seconds_belong_to_the_same_run():
    runs = [Run([[7] * 12], [[seconds] * 12]) for seconds in (1.0, 3.0)]
    assert (summarize_runs(runs)["seconds"], summarize_runs(runs)["tokens_per_second"]) == (2.0, 6.0)


def test_bench_without_a_command_lists_all_of_them(capsys):
    assert main(["bench"]) == 0
    out, err = capsys.readouterr()
    listed = out.split("Commands:")[1]
    assert all(name in listed for name in ("throughput", "latency", "prefix", "offload")) and "..." not in listed
    assert err == ""


@pytest.mark.parametrize(
    ("name", "new"),
    [("peers", "race")] + [(name, name) for name in ("published", "paged", "routing", "launches", "speculation")],
)
@pytest.mark.parametrize("flags", [(), ("--help",), ("--shape", "smollm2-135m", "--rounds", "1")])
def test_benchmark_that_moved_names_its_new_command(name, new, flags, capsys):
    assert main(["bench", name, *flags]) == 2
    out, err = capsys.readouterr()
    expected = f"nanovllm bench {name} is now: python -m stages.bench {new} (in a clone of the repository)"
    assert (out, err) == ("", f"error: {expected}\n")


def test_help_imports_no_torch():
    import subprocess

    code = "import sys; from nanovllm.cli.bench import bench; print('torch' in sys.modules, 'aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False False\n"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--input-len", "60", "--output-len", "5"], "60 + 5 tokens, but max_model_len is 64"),
        (["--json", "no/such/folder/a.json"], "[Errno 2] No such file or directory: 'no/such/folder/a.json'"),
        (["--json", "."], "[Errno 21] Is a directory: '.'"),
        (["--rounds", "0"], "'--rounds': 0 is not in the range x>=1."),
        (["--model", "no/such/folder/here"], "no/such/folder/here"),
    ],
)
def test_invalid_option_is_a_one_line_error(run, flags, expected):
    status, out, err = run("bench latency", *flags)
    assert (status, out) == (2, "") and err.startswith("error: ") and expected in err and err.count("\n") == 1


def test_invalid_prompt_file_is_named(run, tmp_path):
    (tmp_path / "a").write_bytes(b"a\xff")
    status, out, err = run("bench throughput", "--prompts", str(tmp_path / "a"))
    assert (status, out) == (2, "") and str(tmp_path / "a") in err and "0xff" in err


# The numbers


def test_run_has_each_token_once_and_in_order(checkpoint):
    llm = LLM(checkpoint, **OPTIONS, max_num_seqs=2)
    run = serve(llm, random_tasks(320, 3, 5, 4))
    assert (run.num_tokens, len(run.first_tokens), len(run.gaps)) == (12, 3, 9)
    assert run.num_steps == 8, "two at a time, then one"
    assert min(run.gaps) > 0 and max(run.first_tokens) < run.seconds
    assert serve(llm, random_tasks(320, 3, 5, 4), detokenize=False).tokens == run.tokens


def test_failed_request_raises():
    output = SimpleNamespace(request_id="r", error="too long")
    steps = iter([[output]])
    engine = SimpleNamespace(
        add_request=lambda id, *rest: setattr(output, "request_id", id),
        has_unfinished_requests=lambda: True,
        step=lambda: next(steps),
    )
    stats = SimpleNamespace(blocks_loaded=0, disk_blocks_loaded=0)
    llm: Any = SimpleNamespace(llm_engine=engine, reset_prefix_cache=lambda: True, stats=lambda: stats)
    with pytest.raises(ValueError, match="too long"):
        serve(llm, [Task([1], 1)])


@pytest.mark.parametrize("tied", [False, True])
def test_floor_counts_weights_of_a_step_and_slots_before_a_token(tmp_path, tied):
    folder = write_checkpoint(tmp_path, tie_word_embeddings=tied)
    llm = LLM(folder, **OPTIONS)
    model = load_model(folder, llm.model_config, llm.llm_engine.dtype, llm.llm_engine.device)
    weights = sum(weight.nbytes for weight in model.parameters())
    embedding = 0 if tied else 320 * 32 * 4
    assert floor.weight_bytes(llm) == weights - embedding
    task = Task([1, 2, 3], 3)  # the second token reads 4 slots, the third 5
    slot_bytes = llm.llm_engine.kv_cache.bytes_per_token
    assert floor.Floor.of(llm).num_bytes([task], num_steps=2) == 2 * (weights - embedding) + 9 * slot_bytes
