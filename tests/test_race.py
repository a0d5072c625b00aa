"""The race with other engines: files for llama.cpp hold the same weights, and one command writes all reports."""

import json

import pytest
import torch

from models.training import gguf_files
from nanovllm import LLM
from nanovllm.bench.floor import Floor
from nanovllm.checkpoints.gguf import read_header
from nanovllm.checkpoints.model_config import read_model_config
from stages.bench import race_models
from stages.bench.models import storyteller_of
from stages.bench.peers import PeerSpec
from stages.bench.steady import BusyMachineError, Quiet
from stages.tools.prose import peers

gguf = pytest.importorskip("gguf")


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
    command = ["--models", "7M", "--out", str(out), "--", "--rounds", "1", "--jobs", "1", "--no-transformers"]
    race_models.main(command, Quiet(lambda: 0.0, sleep=lambda seconds: None))
    [report] = json.loads(out.read_text())
    assert report["model"] == "7M" and list(report["measured"]) == ["nanovllm", "nanovllm int8", "nanovllm int4"]
    assert "7M" in peers.picture([report]) and "1 sequence" in peers.table_of(report)


def test_race_beside_other_work_is_not_written(tmp_path, monkeypatch):
    seconds, raced = iter([0.0, 0.0, 0.0, 0.0, 9.0]), []  # the last is after the race
    clock = iter([0.0, 0.0, 1.0, 1.0, 11.0])
    monkeypatch.setattr(race_models, "race", lambda name, args: raced.append(name))
    quiet = Quiet(lambda: next(seconds), lambda: next(clock), lambda seconds: None)
    with pytest.raises(BusyMachineError, match="7M was not measured: each time"):
        race_models.main(["--models", "7M", "--out", str(tmp_path / "peers.json")], quiet)
    assert raced == ["7M"] and not (tmp_path / "peers.json").exists()
