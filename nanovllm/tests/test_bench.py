"""nanovllm bench: a table and JSON, tiny; what is measured is what is asked for."""

import json
import re

import pytest

from .. import LLM
from ..__main__ import main
from ..checkpoints.weights import load_model
from ..cli.benchmarks import floor, timing, workload
from ..cli.benchmarks.throughput import numbers
from .helpers import OPTIONS, write_checkpoint

SMALL = ("--input-len", "6", "--output-len", "3", "--rounds", "2")
PREFIX = ("--prefix-len", "32", "--input-len", "4", "--output-len", "2", "--rounds", "2", "--block-size", "4")


@pytest.fixture
def bench(run, tmp_path):
    """bench("latency", flags) is (the numbers, the table)."""

    def command(name: str, *flags: str, peer: str = "--no-peer") -> tuple[dict, str]:
        file = tmp_path / "found.json"
        status, out, err = run(f"bench {name}", peer, "--json", str(file), *flags)
        assert (status, err) == (0, "")
        return json.loads(file.read_text()), out

    return command


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    monkeypatch.setattr(floor, "MAX_BYTES", 1 << 20)


def test_throughput_has_numbers_and_a_table(bench, checkpoint):
    found, table = bench("throughput", "--num-prompts", "3", *SMALL)
    numbers = found["measured"]["nanovllm"]
    assert found["settings"] == {"num_prompts": 3, "input_len": 6, "output_len": 3, "spread": 0.0, "rounds": 2}
    assert (found["machine"]["model"], found["machine"]["dtype"]) == (str(checkpoint), "float32")
    assert numbers["steps"] == 3 and numbers["tokens_per_second"] > 0 and 0 < numbers["floor_share"] < 1
    for name in ("first_token_ms", "between_tokens_ms"):
        assert 0 < numbers[name]["p50"] <= numbers[name]["p90"] <= numbers[name]["p99"]
    assert re.search(r"\n *tokens per second +[\d.,]+\n", table) and table.startswith("throughput: num prompts 3,")


def test_prompts_may_come_from_a_file(bench, tmp_path):
    (tmp_path / "prompts.txt").write_text("the fox\n\nthe wood and the fox\n")
    found, _ = bench("throughput", "--prompts", str(tmp_path / "prompts.txt"), *SMALL)
    assert found["settings"]["num_prompts"] == 2 and found["measured"]["nanovllm"]["steps"] == 3


def test_latency_is_of_a_few_requests(bench):
    found, _ = bench("latency", "--batch-size", "2", *SMALL)
    assert found["settings"]["batch_size"] == 2 and found["measured"]["nanovllm"]["steps"] == 3


def test_a_cached_beginning_is_hit_and_a_new_one_is_not(bench):
    found, table = bench("prefix", *PREFIX)
    hits = {name: numbers["tokens_hit"] for name, numbers in found["measured"].items()}
    assert hits == {"new": 0, "cached": 32} and found["sooner"]["median"] > 0 and "times as soon" in table


def test_what_left_the_device_comes_back_from_the_host(bench):
    found, table = bench("offload", *PREFIX)
    numbers = found["measured"]
    assert {name: each["tokens_hit"] for name, each in numbers.items()} == {
        "computed": 0,
        "on the device": 32,
        "on the host": 32,
    }
    assert numbers["on the device"]["blocks_loaded"] == 0 < numbers["on the host"]["blocks_loaded"] <= 8
    assert found["auto"] in ("load", "compute again") and "GB/s" in table


def test_a_pool_with_room_for_all_sends_nothing_to_the_host_and_says_so(bench):
    _, table = bench("offload", *PREFIX, "--kv-cache-tokens", "4096")
    assert "nothing went to the host: the pool has room for all of it" in table


def test_json_may_go_to_standard_output_and_the_table_goes_elsewhere(run):
    status, out, err = run("bench latency", "--no-peer", "--json", "-", *SMALL)
    assert status == 0 and json.loads(out)["bench"] == "latency" and err.startswith("latency: ")


@pytest.mark.full
@pytest.mark.parametrize("name", ["throughput", "latency", "prefix"])
def test_transformers_serves_the_same_in_the_same_run(bench, name):
    flags = PREFIX if name == "prefix" else SMALL
    found, table = bench(name, *flags, *(("--spread", "0.5") if name == "throughput" else ()), peer="--peer")
    assert found["measured"]["transformers"]["seconds"] > 0 and "transformers" in table
    if name != "prefix":
        assert re.search(r"nanovllm is \d+\.\d\d times as fast", table) and found["speedup"]["median"] > 0


@pytest.mark.full
def test_transformers_serves_the_likeliest_tokens_whatever_the_checkpoint_recommends(tmp_path):
    """A penalty of the checkpoint would be work that only one of the two does."""
    from ..cli.benchmarks.peer import Peer

    folder = write_checkpoint(tmp_path)
    (folder / "generation_config.json").write_text('{"repetition_penalty": 1.5, "temperature": 0.1, "eos_token_id": 2}')
    config = Peer(LLM(folder, **OPTIONS))._model.generation_config
    assert (config.repetition_penalty, config.eos_token_id, config.do_sample) == (None, None, False)


@pytest.mark.full
def test_of_a_padded_batch_only_tokens_that_were_asked_for_count(checkpoint):
    from ..cli.benchmarks.peer import Peer

    llm = LLM(checkpoint, **OPTIONS)
    tasks = workload.random_tasks(llm, 3, 12, 8, spread=0.5)
    runs = timing.serve(llm, tasks), Peer(llm).serve(tasks)
    assert runs[0].num_tokens == runs[1].num_tokens == sum(task.num_tokens for task in tasks)


def test_transformers_that_is_not_there_is_told(run, monkeypatch):
    monkeypatch.setattr("nanovllm.cli.benchmarks.peer.find_spec", lambda name: None)
    _, out, _ = run("bench latency", *SMALL)
    assert "transformers is not installed" in out


def test_a_speed_and_the_seconds_beside_it_are_of_the_same_run():
    runs = [timing.Run(seconds, num_tokens=12) for seconds in (1.0, 3.0)]
    assert (numbers(runs)["seconds"], numbers(runs)["tokens_per_second"]) == (2.0, 6.0)


def test_without_a_benchmark_there_is_a_list_of_them_in_whole_sentences(capsys):
    assert main(["bench"]) == 0
    out, err = capsys.readouterr()
    listed = out.split("Commands:")[1]
    assert all(name in listed for name in ("throughput", "latency", "prefix", "offload")) and "..." not in listed
    assert err == ""


def test_prompts_that_are_no_text_are_told_with_their_file(run, tmp_path):
    (tmp_path / "a").write_bytes(b"a\xff")
    says = f"error: {tmp_path / 'a'}: no utf-8 text: byte 0xff\n"
    assert run("bench throughput", "--no-peer", "--prompts", str(tmp_path / "a")) == (2, "", says)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--input-len", "60", "--output-len", "5"], "a prompt and its output have 60 + 5 tokens: max_model_len is 64"),
        (["--json", "no/such/folder/a.json"], "[Errno 2] No such file or directory: 'no/such/folder/a.json'"),
        (["--json", "."], "[Errno 21] Is a directory: '.'"),
        (["--rounds", "0"], "Invalid value for '--rounds': 0 is not in the range x>=1."),
        (["--model", "no/such/folder/here"], "there is no folder"),
        (["--input-len", "9" * 23], "a prompt and its output have 99999"),
    ],
)
def test_a_mistake_is_one_line(run, flags, says):
    status, out, err = run("bench latency", "--no-peer", *flags)
    assert (status, out) == (2, "") and err.startswith(f"error: {says}") and err.count("\n") == 1


# What the numbers are made of


def test_a_token_is_counted_once_and_its_time_is_after_the_one_before(checkpoint):
    llm = LLM(checkpoint, **OPTIONS, max_num_seqs=2)
    tasks = workload.random_tasks(llm, 3, 5, 4)
    run = timing.serve(llm, tasks)
    assert (run.num_tokens, len(run.first_tokens), len(run.gaps)) == (12, 3, 9)
    assert run.num_steps == 8, "two at a time, then one"
    assert min(run.gaps) > 0 and max(run.first_tokens) < run.seconds


@pytest.mark.parametrize("tied", [False, True])
def test_the_floor_counts_the_weights_that_a_step_reads_and_the_keys_and_values_before_a_token(tmp_path, tied):
    folder = write_tied(tmp_path) if tied else write_checkpoint(tmp_path)
    llm = LLM(folder, **OPTIONS)
    model = load_model(folder, llm.model_config, llm.llm_engine.dtype, llm.llm_engine.device)
    weights = sum(weight.nbytes for weight in model.parameters())
    embedding = 0 if tied else 320 * 32 * 4
    assert floor.weight_bytes(llm) == weights - embedding
    task = workload.Task([1, 2, 3], 3)  # the second token reads 4 slots, the third 5
    assert floor.kv_bytes(llm, [task]) == 9 * llm.llm_engine.kv_cache.bytes_per_token


def write_tied(folder):
    from safetensors.torch import load_file, save_file

    write_checkpoint(folder, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    return folder
