"""nanovllm inspect: its numbers agree with real models and pools, and with calculations by hand."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ... import LLM, EngineConfig
from ...__main__ import main
from ...checkpoints import sizes as of_memory
from ...checkpoints.known import KNOWN
from ...checkpoints.model_config import read_model_config
from ...checkpoints.sizes import (
    DTYPE_BYTES,
    SHAPES,
    Fit,
    Shape,
    gpu_bytes,
    kv_bytes_per_token,
    parameters,
    parse_size,
)
from ...engine.kv_cache import KVCache
from ...host_memory import host_memory
from ...llama import LlamaForCausalLM, ModelConfig
from ...llama.weights import NoInit
from ..testing.checkpoints import write_checkpoint
from ..testing.engines import OPTIONS

PACKAGE = Path(__file__).resolve().parents[2]
PUBLISHED = {  # parameters, as counted by the publishers
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
}


def as_config(shape: Shape) -> ModelConfig:
    return ModelConfig(**vars(shape))


def built(config: ModelConfig) -> LlamaForCausalLM:
    with torch.device("meta"), NoInit():
        return LlamaForCausalLM(config, max_model_len=1)


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]):
    """Return a function that runs the command with its arguments and --json. It returns the numbers."""

    def run(*arguments: str) -> dict:
        assert main(["inspect", *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


# Counts


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_match_the_model(name):
    parts = dict.fromkeys(("embedding", "attention", "MLP", "norms", "head"), 0)
    for parameter, tensor in built(as_config(SHAPES[name])).named_parameters():  # a tied head is listed once
        of = {"embed": "embedding", "attn": "attention", "mlp": "MLP", "lm_head": "head"}
        part = "norms" if "norm" in parameter else next(part for key, part in of.items() if key in parameter)
        parts[part] += tensor.numel()
    assert parts == parameters(SHAPES[name])


def test_biases_are_counted():
    odd = replace(SHAPES["llama-2-7b"], num_hidden_layers=1, head_dim=20, num_key_value_heads=2)
    for name in ("attention_bias", "attention_output_bias", "mlp_bias", "qk_norm"):
        shape = replace(odd, **{name: True})
        assert sum(parameters(shape).values()) == sum(p.numel() for p in built(as_config(shape)).parameters())
        assert parameters(shape) != parameters(odd)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_match_the_published_counts(name):
    assert sum(parameters(SHAPES[name]).values()) == PUBLISHED[name]


@pytest.mark.parametrize("name", SHAPES)
def test_bytes_of_a_token_match_the_pool(name):
    for dtype, itemsize in DTYPE_BYTES.items():
        for stored in ("auto", "int8", "fp8"):
            pool = KVCache(as_config(SHAPES[name]), 1, 4, getattr(torch, dtype), torch.device("cpu"), stored)
            assert kv_bytes_per_token(SHAPES[name], itemsize, stored) == pool.bytes_per_token


def test_blocks_match_the_pool(checkpoint):
    config = read_model_config(checkpoint)
    fit = Fit(config, itemsize=4, room=10**6, block_size=16, max_model_len=64)
    weights = fit.weight_bytes
    llm = LLM(checkpoint, **OPTIONS, kv_cache_memory_bytes=10**6 - weights)
    assert weights == sum(p.nbytes for p in llm.llm_engine.executor.model.parameters())
    pool = llm.llm_engine.kv_cache
    assert pool.num_blocks == fit.num_blocks > 0 and pool.blocks[0].nbytes == fit.block_bytes


# By hand


def test_llama_2_7b_in_24_gib(report):
    """Weights and KV cache get 21.6 of 24 GiB, the weights 12.55 of them: 1,158 blocks of 8 MiB are left."""
    result = report("llama-2-7b", "--memory", "24GiB", "--bandwidth", "1TB/s", "--length", "100", "--length", "4096")
    assert result["dtype"] == "bfloat16" and result["weight_bytes"]["bfloat16"] == 2 * 6_738_415_616
    assert result["kv_bytes_per_token"] == 2 * 32 * 32 * 128 * 2 and result["kv_bytes_per_block"] == 8 * 2**20
    assert result["memory"]["weights_and_pool"] == int(0.9 * 24 * 2**30) and result["fits"]
    assert result["num_blocks"] == (int(0.9 * 24 * 2**30) - 2 * 6_738_415_616) // (8 * 2**20) == 1158
    short, long = result["sequences"]
    assert (short["contiguous"], short["paged"]) == (1158 * 16 // 4096, 1158 // 7) == (4, 165)
    assert (long["contiguous"], long["paged"]) == (4, 1158 // 256)
    read = 2 * (6_738_415_616 - 32000 * 4096)  # without the embedding, which is not the head
    assert result["seconds_per_token_alone"] == pytest.approx(read / 1e12)
    assert short["step_seconds"] == pytest.approx((read + 165 * 100 * 524288) / 1e12)
    assert short["tokens_per_second"] == pytest.approx(165 / short["step_seconds"])


def test_options_change_the_numbers(report):
    plain, half = (
        report("llama-3.2-1b", "--memory", "8GiB"),
        report("llama-3.2-1b", "--memory", "8GiB", "--dtype", "float32"),
    )
    assert half["kv_bytes_per_token"] == 2 * plain["kv_bytes_per_token"] and half["num_slots"] < plain["num_slots"] / 2
    large = report("llama-3.2-1b", "--memory", "8GiB", "--block-size", "256", "--gpu-memory-utilization", "1")
    assert large["kv_bytes_per_block"] == 16 * plain["kv_bytes_per_block"] and large["num_slots"] > plain["num_slots"]
    short = report("llama-3.2-1b", "--memory", "8GiB", "--max-model-len", "1000")
    assert short["sequences"][-1]["length"] == 1000
    assert short["sequences"][0]["contiguous"] == plain["num_slots"] // 1000 > plain["sequences"][0]["contiguous"]


def test_model_that_does_not_fit_is_reported_with_the_missing_bytes(capsys):
    assert main(["inspect", "llama-3.1-405b", "--memory", "80GB"]) == 0
    printed = capsys.readouterr().out
    assert "need 688.9 GiB more than that" in printed and "sequences" not in printed  # 756.0 + 0.01 - 67.1


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_inspect_knows_the_bytes_of_weights_that_are_quantized_at_load(report, quantization, tmp_path):
    write_checkpoint(tmp_path, hidden_size=256, intermediate_size=512)
    llm = LLM(tmp_path, quantization=quantization, attention_backend="torch", kv_cache_tokens=64, **OPTIONS)
    weights = sum(weight.nbytes for weight in llm.llm_engine.executor.model.parameters())
    result = report(str(tmp_path), "--memory", "1GB", "--quantization", quantization)
    assert result["memory"]["weights"] == pytest.approx(weights, rel=0.02)
    assert main(["inspect", str(tmp_path), "--quantization", quantization, "--weight-bits", "4"]) == 2


def test_int8_halves_the_bytes_of_keys_and_values(report, capsys):
    given = "llama-3.2-3b", "--memory", "16GiB", "--dtype", "bfloat16"
    plain, result = report(*given), report(*given, "--kv-cache-dtype", "int8")
    assert result["kv_bytes_per_token"] == plain["kv_bytes_per_token"] * (128 + 4) // 256
    assert result["num_slots"] > 1.9 * plain["num_slots"] and result["memory"] == plain["memory"]
    assert report(*given, "--kv-cache-dtype", "fp8")["kv_bytes_per_token"] == plain["kv_bytes_per_token"] // 2
    assert main(["inspect", *given, "--kv-cache-dtype", "int8"]) == 0
    assert "per block of 16, in int8" in capsys.readouterr().out


def test_7b_in_4_bits_fits_a_gpu_of_8_gb(report):
    given = "llama-2-7b", "--memory", "8GB", "--dtype", "float16"
    assert report(*given, "--quantization", "int4")["fits"] and not report(*given)["fits"]


def test_weight_bits_estimate_a_quantized_checkpoint(report, capsys):
    """70.55 billion weights of 4 bits are 35.3 GB: one 80 GB GPU has room for the model and a pool."""
    plain = report("llama-3.1-70b", "--memory", "80GB", "--dtype", "bfloat16", "--bandwidth", "1TB/s")
    result = report(
        "llama-3.1-70b", "--memory", "80GB", "--dtype", "bfloat16", "--bandwidth", "1TB/s", "--weight-bits", "4"
    )
    assert result["memory"]["weights"] == PUBLISHED["llama-3.1-70b"] / 2 and result["weight_bits"] == 4
    assert not plain["fits"] and result["fits"] and plain["kv_bytes_per_token"] == result["kv_bytes_per_token"]
    assert result["num_blocks"] == (72 * 10**9 - PUBLISHED["llama-3.1-70b"] // 2) // result["kv_bytes_per_block"]
    assert result["seconds_per_token_alone"] == pytest.approx(plain["seconds_per_token_alone"] / 4)
    assert main(["inspect", "llama-3.1-70b", "--memory", "80GB", "--weight-bits", "4"]) == 0
    assert "131.4 GiB in bfloat16 or float16, 32.9 GiB in 4 bits" in capsys.readouterr().out


def test_sliding_window_limits_max_model_len(report):
    assert report("mistral-7b-v0.1")["max_model_len"] == 4096
    assert report("mistral-7b-v0.3")["max_model_len"] == 32768


# Sources


def test_folder_and_its_config_json_give_the_same_numbers(report, checkpoint, tmp_path):
    whole = report(str(checkpoint))
    assert whole["parameters"]["total"] == sum(parameters(read_model_config(checkpoint)).values())
    (tmp_path / "other.json").write_text((checkpoint / "config.json").read_text())
    alone = report(str(tmp_path / "other.json"))
    assert {**alone, "model": ""} == {**whole, "model": ""}


def test_default_memory_is_the_gpu_or_the_machine(report, monkeypatch, tmp_path):
    monkeypatch.setattr(of_memory.shutil, "which", lambda _: None)
    result = report("llama-3.2-1b")
    assert result["memory"]["bytes"] == host_memory().total > 2**28 and result["dtype"] == "float32", (
        "the same as the engine on a CPU"
    )
    assert EngineConfig().torch_dtype("bfloat16") == torch.float32
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 81559\necho 40000\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setattr(of_memory.shutil, "which", lambda _: str(tmp_path / "nvidia-smi"))
    result = report("llama-3.2-1b")
    assert result["memory"]["of"] == "this GPU" and result["memory"]["bytes"] == 81559 * 2**20
    assert result["dtype"] == "bfloat16"
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho No devices were found\n")
    assert gpu_bytes() is None


def test_list_prints_known_models(capsys):
    assert main(["inspect", "--list"]) == 0
    assert capsys.readouterr().out.split() == [*SHAPES, *KNOWN]


def test_model_is_an_argument_or_an_option(capsys):
    assert main(["inspect", "llama-3.1-8b", "--memory", "24GiB"]) == 0
    by_name = capsys.readouterr().out
    assert main(["inspect", "--model", "llama-3.1-8b", "--memory", "24GiB"]) == 0
    assert capsys.readouterr().out == by_name
    assert main(["inspect", "a", "--model", "b"]) == 2
    assert capsys.readouterr().err == "error: MODEL and --model exclude each other: got a and b\n"
    assert main(["inspect"]) == 2
    assert capsys.readouterr().err.startswith("error: MODEL is missing")


@pytest.mark.parametrize("memory", ["1GiB", "24GiB", "1000TiB"])
def test_tables_fit_80_columns(capsys, memory):
    for name in SHAPES:
        assert main(["inspect", name, "--memory", memory, "--bandwidth", "3.35TB/s"]) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_known_name_needs_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')")
    code = f"from {PACKAGE.name}.__main__ import main\nmain(['inspect', 'llama-3.1-8b', '--memory', '24GiB'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{tmp_path}:{PACKAGE.parent}", "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.stderr == "" and "8,030,261,248" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["llama-3.1-8"], "llama-3.1-8 is not a known model: did you mean llama-3.1-8b?"),
        (["nothing-like-it"], "nothing-like-it is not a known model: --list prints the known models"),
        (
            ["/no/such/folder"],
            "the folder /no/such/folder does not exist, and '/no/such/folder' is not a name on the Hub",
        ),
        (["llama-2-7b", "--max-model-len", "5000"], "max_model_len is 5000, but the model's limit is 4096"),
        (["llama-2-7b", "--length", "5000"], "length must be at most 4096, the max_model_len, got 5000"),
        (["llama-2-7b", "--length", "0"], "--max-model-len and --length must be at least 1, got 0"),
        (["llama-2-7b", "--block-size", "0"], "Invalid value for '--block-size': 0 is not in the range x>=1."),
        (
            ["llama-2-7b", "--memory", "much"],
            "'much' is not a size such as 4096, 4k (4,000), 4K (4,096)",
        ),
        (["llama-2-7b", "--memory", "1e9"], "'1e9' is not a size"),
        (["llama-2-7b", "--bandwidth", "-1"], "'-1' is not a size"),
        (["llama-2-7b", "--bandwidth", "0"], "bandwidth must be above 0"),
        (
            ["llama-2-7b", "--gpu-memory-utilization", "1.5"],
            "1.5 is not in the range 0<x<=1.",
        ),
        ([], "MODEL is missing: "),
    ],
)
def test_invalid_argument_is_a_one_line_error(capsys, arguments, error):
    assert main(["inspect", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and error in err and err.count("\n") == 1


def test_unsupported_architecture_is_named(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "architectures": ["Gemma3ForCausalLM"]}')
    assert main(["inspect", str(tmp_path)]) == 2
    assert "['Gemma3ForCausalLM'] (model_type gemma3)" in capsys.readouterr().err


def test_invalid_sizes():
    for text in ("", "GiB", "1iB", "1.2.3", "1 2", "٣", "1" * 400):
        with pytest.raises(ValueError, match="is not a size"):
            parse_size(text)


def test_tiers_take_the_time_of_their_bytes(capsys):
    """A block of 16 tokens of a 70B model has 5,242,880 bytes."""
    assert main(["inspect", "llama-2-70b", "--memory", "80GB", "--weight-bits", "4", "--tiers", "--json"]) == 0
    tiers = {row["link"]: row for row in json.loads(capsys.readouterr().out)["tiers"]}
    assert tiers["NVMe, PCIe 4.0"]["block_seconds"] == pytest.approx(5_242_880 / 7e9)
    assert tiers["NVLink 4"]["sequence_seconds"] == pytest.approx(256 * 5_242_880 / 450e9)  # of 4,096 tokens
    assert main(["inspect", "llama-2-70b", "--memory", "80GB", "--weight-bits", "4", "--tiers"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  NVMe, PCIe 4.0, 7 GB/s        0.749 ms       191.7 ms" in lines
    assert main(["inspect", "llama-2-70b", "--memory", "80GB"]) == 0 and "NVLink" not in capsys.readouterr().out
