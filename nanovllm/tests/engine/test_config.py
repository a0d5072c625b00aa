"""EngineConfig: the values that each field takes, its command-line option, and the size of the pool."""

import json
import math
import re
from dataclasses import fields
from pathlib import Path

import click
import pytest
import torch

from ...build import num_blocks_for
from ...cli.click_options import engine_options
from ...llama import ModelConfig
from ...llm import LLM
from ...options.config import EngineConfig

MODEL = ModelConfig(320, 32, 48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
TOKEN = 2 * 2 * 2 * 8 * 4  # bytes of a token in the pool: layers x (key + value) x KV heads x head_dim x float32


def parse(*argv: str) -> EngineConfig:
    """Return the config that a command builds from its options."""
    values = click.Command("generate", params=engine_options()).make_context("generate", [*argv]).params
    return EngineConfig(**{name: value for name, value in values.items() if value is not None})


# Options of the command line


def test_no_options_give_the_defaults():
    assert parse() == EngineConfig()


def test_each_field_with_a_help_text_is_an_option_of_its_type():
    given = {
        "model": "some/folder",
        "device": "cuda:1",
        "dtype": "bfloat16",
        "max_model_len": 100,
        "max_num_seqs": 7,
        "max_num_batched_tokens": 100,
        "watermark": 0.5,
        "block_size": 4,
        "tile_size": 32,
        "enable_prefix_caching": True,
        "offload_policy": "load",
        "kv_offloading_tokens": 64,
        "kv_disk_dir": "some/folder",
        "kv_disk_size": 0.5,
        "kv_disk_save": "all",
        "kv_cache_dtype": "int8",
        "seed": 5,
        "attention_backend": "torch",
        "quantization": "int4",
        "async_scheduling": False,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 8},
        "tensor_parallel_size": 1,
    }
    pool = {"kv_cache_tokens": 640, "kv_cache_memory_bytes": 10**6, "gpu_memory_utilization": 0.5}
    assert {field.name for field in fields(EngineConfig) if "help" in field.metadata} == {
        *given,
        *pool,
        "enforce_eager",
    }
    for size, value in pool.items():
        options = given | {size: value}
        argv = [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]
        speculation = argv.index("--speculative-config")
        argv[speculation + 1] = json.dumps(given["speculative_config"])
        for name, flag in (
            ("enable-prefix-caching", "enable-prefix-caching"),
            ("async-scheduling", "no-async-scheduling"),
        ):
            on_off = argv.index(f"--{name}")
            argv[on_off : on_off + 2] = [f"--{flag}"]
        assert parse(*argv) == EngineConfig(**options)


@pytest.mark.parametrize(
    "argv",
    [
        ["--max-num-seqs", "many"],
        ["--max-num-batched-tokens", "4.5"],
        ["--watermark", "low"],
        ["--block-size", "4.5"],
        ["--tile-size", "x"],
        ["--dtype", "int8"],
        ["--offload-policy", "never"],
    ],
)
def test_option_of_the_wrong_type_is_refused(argv):
    with pytest.raises(click.BadParameter) as caught:
        parse(*argv)
    assert caught.value.exit_code == 2 and argv[0] in caught.value.format_message()


# Invalid values


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_model_len", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("watermark", -0.01),
        ("watermark", 1.0),
        ("watermark", float("nan")),
        ("block_size", 0),
        ("block_size", -4),
        ("tile_size", 0),
        ("tile_size", -16),
        ("kv_cache_tokens", -5),
        ("kv_cache_memory_bytes", 0),
        ("kv_cache_memory_bytes", 1e9),
        ("max_num_seqs", "8"),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.5),
        ("dtype", "float64"),
        ("max_num_seqs", True),
        ("max_num_seqs", None),
        ("max_model_len", math.nan),
        ("kv_cache_tokens", 10**23),
        ("gpu_memory_utilization", "0.9"),
        ("gpu_memory_utilization", True),
        ("gpu_memory_utilization", math.nan),
        ("seed", None),
        ("seed", 2**63),
        ("model", None),
        ("model", 3),
        ("device", 3),
        ("device", None),
        ("dtype", torch.float16),
        ("dtype", None),
        ("dtype", ["auto"]),
        ("kv_cache_dtype", "fp4"),
        ("kv_cache_dtype", None),
    ],
)
def test_invalid_value_is_named(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be .+, got {re.escape(repr(value)[:9])}.*$"):
        EngineConfig(**{name: value})


def test_size_of_the_pool_is_given_once():
    with pytest.raises(ValueError, match="only once, got kv_cache_tokens, gpu_memory_utilization"):
        EngineConfig(kv_cache_tokens=10, gpu_memory_utilization=0.5)


NO_VALUES: list[object] = [b"1", [], {}, 1j, object(), math.inf, torch.ones(2, 2), -(10**23)]


@pytest.mark.parametrize("name", [field.name for field in fields(EngineConfig)])
@pytest.mark.parametrize("value", NO_VALUES, ids=lambda value: type(value).__name__)
def test_no_option_takes_a_value_of_an_unrelated_type(name, value):
    if name in ("hf_overrides", "speculative_config") and isinstance(value, dict):
        pytest.skip("this option is a dictionary")
    with pytest.raises(ValueError, match=f"^{name} must be .+, got .+$"):
        EngineConfig(**{name: value})


def test_numpy_numbers_are_accepted():
    np = pytest.importorskip("numpy")
    config = EngineConfig(kv_cache_tokens=np.int64(640), seed=np.uint8(3))
    assert config == EngineConfig(kv_cache_tokens=640, seed=3)
    assert type(config.kv_cache_tokens) is type(config.seed) is int


def test_max_model_len_is_at_most_the_positions_of_the_model(checkpoint):
    assert LLM(checkpoint).max_model_len == 64
    assert LLM(checkpoint, max_model_len=64).max_model_len == 64
    with pytest.raises(ValueError, match="max_model_len is 65, but the model has 64 positions"):
        LLM(checkpoint, max_model_len=65)


@pytest.mark.parametrize("model", [3, b"folder"], ids=repr)
def test_model_is_a_string_or_a_path(checkpoint, model):
    assert LLM(Path(checkpoint)).config == LLM(str(checkpoint)).config
    with pytest.raises(ValueError, match="model must be a string, got "):
        LLM(model)


@pytest.mark.parametrize("device", ["warp", "", "cuda:99", "cuda:-1", "cuda:" + "9" * 23, "meta", "cpu ", "CPU"])
def test_missing_device_is_named(device):
    with pytest.raises(ValueError, match=f"device '{device}' is not available: .+"):
        EngineConfig(device=device).torch_device()


# The dtype


def test_auto_is_float32_on_the_cpu_and_the_checkpoints_type_elsewhere():
    for device in ("cpu", "cpu:0"):
        assert EngineConfig(device=device).torch_dtype("bfloat16") == torch.float32
    for device in ("cuda", "cuda:1", "mps"):
        assert EngineConfig(device=device).torch_dtype("bfloat16") == torch.bfloat16


def test_explicit_dtype_is_used_on_every_device():
    assert EngineConfig(dtype="float16").torch_dtype("bfloat16") == torch.float16


def test_keys_and_values_have_the_dtype_or_8_bits():
    for name in ("auto", "bfloat16", "int8", "fp8"):
        assert EngineConfig(dtype="bfloat16", kv_cache_dtype=name).torch_dtype("float32") == torch.bfloat16
    with pytest.raises(ValueError, match="must be auto, int8, fp8 or the dtype, float32, got 'bfloat16'"):
        EngineConfig(kv_cache_dtype="bfloat16").torch_dtype("bfloat16")
    with pytest.raises(ValueError, match="one of auto, float32, bfloat16, float16, int8, fp8, got 'fp4'"):
        EngineConfig(kv_cache_dtype="fp4")


# The tile


def test_tiles_are_larger_where_operations_take_longer_to_start():
    assert EngineConfig(device="cpu").tile_slots() == 4096
    assert EngineConfig(device="cuda:0").tile_slots() == EngineConfig(device="mps").tile_slots() == 16384


def test_explicit_tile_size_is_used_on_every_device():
    assert [EngineConfig(device=device, tile_size=48).tile_slots() for device in ("cpu", "cuda")] == [48, 48]


# The pool


def blocks(device: str = "cpu", max_model_len: int = 64, block_size: int = 4, **options) -> int:
    config = EngineConfig(device=device, block_size=block_size, **options)
    return num_blocks_for(config, MODEL, max_model_len, torch.device(device))


def test_pool_given_in_tokens_has_whole_blocks(checkpoint):
    assert blocks(kv_cache_tokens=76) == blocks(kv_cache_tokens=79) == 19
    assert blocks(kv_cache_tokens=79, block_size=1) == 79
    report = LLM(checkpoint, block_size=4, kv_cache_tokens=77).llm_engine.kv_cache_manager.report()
    assert report.num_slots == 76


def test_pool_given_in_bytes_has_the_blocks_that_fit():
    assert blocks(kv_cache_memory_bytes=40 * TOKEN) == blocks(kv_cache_memory_bytes=44 * TOKEN - 1) == 10
    assert blocks(kv_cache_memory_bytes=40 * TOKEN, dtype="float16") == 20


@pytest.mark.parametrize(
    "options, room",
    [
        ({"kv_cache_tokens": 3}, 3),
        ({"kv_cache_memory_bytes": 4 * TOKEN - 1}, 3),
        ({"kv_cache_memory_bytes": TOKEN - 1}, 0),
    ],
    ids=str,
)
def test_pool_too_small_for_a_block_is_refused(options, room):
    with pytest.raises(ValueError, match=f"at least one block of 4 slots, got {room}"):
        blocks(**options)


def test_pool_may_have_a_single_block(checkpoint):
    assert blocks(kv_cache_tokens=4) == blocks(kv_cache_memory_bytes=4 * TOKEN) == 1
    with pytest.raises(ValueError, match="at least one block of 16 slots, got 15"):
        LLM(checkpoint, kv_cache_tokens=15)


def test_default_pool_on_the_cpu_holds_a_full_batch_in_at_most_a_gibibyte():
    assert blocks(max_num_seqs=3, max_model_len=20) == 3 * (20 + 3) // 4
    assert blocks(max_num_seqs=1000, max_model_len=100_000) == 2**30 // TOKEN // 4


def test_default_pool_rounds_each_sequence_up_to_whole_blocks():
    assert blocks(max_num_seqs=3, max_model_len=21) == 3 * 6
    assert blocks(max_num_seqs=1, max_model_len=3) == 1


def test_gpu_memory_utilization_counts_the_gpus_whole_memory(monkeypatch):
    """The GPU has room for 1,000 tokens, and the weights take 300: 0.5 leaves 200 tokens, 0.9 leaves 600."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700 * TOKEN, 1000 * TOKEN))
    assert blocks("cuda", dtype="float32", gpu_memory_utilization=0.5) == 50
    assert blocks("cuda", dtype="float32") == 150
    with pytest.raises(ValueError, match="at least one block of 4 slots, got 0"):
        blocks("cuda", dtype="float32", gpu_memory_utilization=0.2)


def test_gpu_memory_utilization_is_refused_on_the_cpu():
    with pytest.raises(ValueError, match=r"gpu_memory_utilization .*cpu"):
        blocks(gpu_memory_utilization=0.5)


@pytest.mark.parametrize(
    ("device", "option", "expected"),
    [("cuda:1", None, True), ("cpu", None, False), ("cuda", False, False), ("cpu", True, True)],
)
def test_steps_overlap_by_default_on_a_gpu(device, option, expected):
    assert EngineConfig(device=device, async_scheduling=option).overlaps_steps is expected
