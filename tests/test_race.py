"""The race with other engines: files for llama.cpp hold the same weights, and one command writes all reports."""

import json
import re
from typing import Any

import pytest
import torch

from models.training import gguf_files
from nanovllm import LLM
from nanovllm.bench import floor
from nanovllm.bench.floor import Floor
from nanovllm.checkpoints.gguf import read_header
from nanovllm.checkpoints.model_config import read_model_config
from stages.bench import peers as bench_peers
from stages.bench import race_models
from stages.bench.models import storyteller_of
from stages.bench.peers import PeerSpec
from stages.bench.results import host
from stages.bench.steady import Quiet
from stages.tools.prose import peers
from tests.fake_peer import write_fake_peer

gguf = pytest.importorskip("gguf")
IDLE = Quiet(lambda: 0.0, sleep=lambda seconds: None)


def test_file_for_llama_cpp_has_the_weights_of_the_folder(tmp_path):
    from safetensors.torch import load_file

    folder, file = storyteller_of(64), tmp_path / "model.gguf"
    gguf_files.write_gguf(folder, file)
    metadata, tensors = read_header(file)
    config, weights = read_model_config(folder), load_file(folder / "model.safetensors")
    assert metadata.values["llama.attention.head_count_kv"] == config.num_key_value_heads
    assert len(tensors) == len(weights)
    stored = {each.name: each for each in gguf.GGUFReader(file).tensors}
    for name, part in (("blk.1.attn_q.weight", "self_attn.q_proj"), ("blk.1.ffn_down.weight", "mlp.down_proj")):
        values = torch.from_numpy(gguf.dequantize(stored[name].data, stored[name].tensor_type).copy())
        expected = weights[f"model.layers.1.{part}.weight"].float()
        if part.endswith("q_proj"):  # halves of a head alternate
            half = config.head_dim // 2
            order = [
                head * config.head_dim + i % 2 * half + i // 2
                for head in range(config.num_attention_heads)
                for i in range(2 * half)
            ]
            expected = expected[order]
        torch.testing.assert_close(values, expected, rtol=0, atol=0)
    llm = LLM(folder, dtype="bfloat16", kv_cache_tokens=64)
    own, theirs = Floor.of(llm), PeerSpec("llama.cpp", "python", str(file)).floor(llm)
    assert theirs.slot_bytes == own.slot_bytes and own.step_bytes <= theirs.step_bytes < own.step_bytes * 1.001


@pytest.mark.full
def test_one_command_writes_a_report_for_each_model(tmp_path):
    out = tmp_path / "peers.json"
    out.write_text(json.dumps([{"model": "1.1B"}, {"model": "7M"}, {"model": "removed"}]))
    short = ("--rounds", "1", "--jobs", "1", "--prompts", "", "--busy-jobs", "", "--no-transformers")
    race_models.main(["--models", "7M", "--out", str(out), "--", *short], IDLE)
    report, other = json.loads(out.read_text())
    assert report["model"] == "7M" and list(report["measured"]) == ["nanovllm", "nanovllm int8", "nanovllm int4"]
    assert other == {"model": "1.1B"}, "a model that is not raced keeps its report"
    assert "7M" in peers.picture([report]) and "1 sequence" in peers.table_of(report)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Keep unpacked files in a folder of the test, and measure little memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(floor, "NUM_BYTES", 1 << 20)
    monkeypatch.setattr(race_models, "quantize_gguf", lambda original, type, file, python: file.symlink_to(original))
    monkeypatch.setattr(race_models, "gguf_of", lambda shape: tmp_path / "original.gguf")
    gguf_files.write_gguf(storyteller_of(64), tmp_path / "original.gguf")


def test_two_engines_race_on_one_file(small, tmp_path, monkeypatch):
    monkeypatch.setitem(race_models.MODELS, "tiny", race_models.Model("Tiny, Q8_0 file", "storyteller", "", "Q8_0"))
    out, llama = tmp_path / "peers.json", write_fake_peer(tmp_path)
    short = ("--rounds", "1", "--jobs", "1,2", "--max-model-len", "64", "--attention-backend", "torch")
    monkeypatch.setattr(bench_peers, "DECODE_LENGTH", 8)
    out.write_text(json.dumps([{"model": "7M"}, {"model": "Tiny, Q8_0 file"}, {"model": "removed"}]))
    race_models.main(["--models", "tiny", "--llama", llama, "--out", str(out), "--", *short], IDLE)
    other, report = json.loads(out.read_text())
    assert other == {"model": "7M"}, "a model that is not raced keeps its report"
    assert report["file"] == "Q8_0" and list(report["measured"]) == ["nanovllm", "llama.cpp Q8_0"]
    text = peers.table_of(report)
    assert "| tokens per second | nanovllm | share of the floor | llama.cpp Q8_0 | share of the floor |" in text
    assert re.search(
        r"\n\| 2 sequences \| [\d,]+ \(.*\) \| \d+% \| 8 \(8 to 8\) \| \d+% \| kv_unified=(true|false) \| ", text
    )
    assert "greedy output" not in text, "the tokens of random weights say nothing"


def test_floors_of_a_file_differ_in_its_float32_tensors_alone(small, tmp_path):
    file = tmp_path / "original.gguf"
    llm = LLM(file, dtype="bfloat16", kv_cache_tokens=64)
    own, theirs = Floor.of(llm), PeerSpec("llama.cpp", "python", str(file)).floor(llm)
    in_float32 = sum(each.num_bytes for each in read_header(file)[1].values() if each.type == "F32")
    assert 0 < in_float32 == 2 * (theirs.step_bytes - own.step_bytes) and own.slot_bytes == theirs.slot_bytes


# What a person reads


def report_of_settings(**more: Any) -> dict[str, Any]:
    spread = {"median": 2.0, "least": 1.0, "largest": 3.0}
    row = {f"1 sequence{key}": spread for key in (peers.SPEED, peers.SPEEDUP)} | {f"1 sequence{peers.SHARE}": 0.25}
    machine = {"dtype": "bfloat16", "threads": 2, "device": "cpu", "torch": "2"}
    report = {"model": "X", "machine": machine, "measured": {"nanovllm": row, "llama.cpp Q8_0": row}, "settings": {}}
    return report | more


VARIANTS = {
    "variants": {"llama.cpp Q8_0": {"1 sequence": {"best": "kv_unified=true", "speeds": {}}}},
    "advice": {"llama.cpp": {"kv_unified=false": "the library", "kv_unified=true": "the server"}},
}


def test_settings_and_their_sources_are_named():
    report = report_of_settings(**VARIANTS)
    assert "llama.cpp with kv_unified=false (the library), or with kv_unified=true (the server)" in (
        peers.settings_text([report])
    )
    assert "llama.cpp ran each job with kv_unified=false or with kv_unified=true" in peers.picture([report])
    unable = report_of_settings(says=["vllm was not tried with a library: it must be installed", "something else"])
    assert peers.settings_text([unable, unable]) == "vLLM was not tried with a library.\n"
    assert "| fastest with | 1 sequence |\n|---|---|\n| llama.cpp Q8_0 | kv_unified=true |" in peers.table_of(report)


def test_each_race_names_its_machine():
    reports = [report_of_settings(model=name, host=host) for name, host in (("X", "one"), ("Y", "two"), ("Z", "one"))]
    assert [*peers.places(reports)] == ["X and Z: one, device cpu.", "Y: two, device cpu."]
    assert "Y: two, device cpu." in peers.picture(reports) and "**Y**: two, device cpu; " in peers.table_of(reports[1])


def test_equal_outputs_have_no_first_difference():
    agreement = {"llama.cpp Q8_0": {"1 sequence": {"shares": [1.0, 1.0], "margin": 0.0}}}
    report = report_of_settings(**VARIANTS, file="Q8_0", agreement=agreement, settings={"written": True})
    assert "- llama.cpp Q8_0, 1 sequence: the same greedy output for all 2." in peers.table_of(report)


def test_outputs_of_a_trained_model_are_compared():
    agreement = {"llama.cpp Q8_0": {"1 sequence": {"shares": [1.0, 0.5], "margin": 0.1}}}
    report = report_of_settings(**VARIANTS, file="Q8_0", agreement=agreement, settings={"written": True})
    text = peers.table_of(report)
    row = "| 1 sequence | 2 (1 to 3) | 25% | 2 (1 to 3) | 25% | kv_unified=true | the same (1.00 to 3.00) |"
    assert row in text
    assert "llama.cpp Q8_0, 1 sequence: the same greedy output for 1 of 2; on average, 75% of an output comes" in text
    assert "before the first different token, where the two best logits are at most 0.1 apart." in text


def test_race_beside_other_work_is_not_written(tmp_path, monkeypatch, capsys):
    seconds, raced = iter([0.0, 0.0, 0.0, 0.0, 9.0]), []  # the last is after the race
    clock = iter([0.0, 0.0, 1.0, 1.0, 11.0])
    monkeypatch.setattr(race_models, "race", lambda model, args: raced.append(model.title))
    quiet = Quiet(lambda: next(seconds), lambda: next(clock), lambda seconds: None)
    assert race_models.main(["--models", "7M", "--out", str(tmp_path / "peers.json")], quiet) == 1
    assert "7M was not measured: each time" in capsys.readouterr().err
    assert raced == ["7M"] and not (tmp_path / "peers.json").exists()


def test_a_report_keeps_its_machine_when_another_model_is_raced_elsewhere(tmp_path):
    out = tmp_path / "peers.json"
    out.write_text(json.dumps([{"model": "1.1B", "host": "another machine"}, {"model": "7M"}]))
    race_models.store({"model": "135M"}, out)
    reports = json.loads(out.read_text())
    assert [each["model"] for each in reports] == ["7M", "135M", "1.1B"]
    assert [each.get("host") for each in reports] == [None, host(), "another machine"]
