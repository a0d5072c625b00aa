"""EngineConfig: the options, and the limits that they give an engine."""

from pathlib import Path

import pytest
import torch

from ..config import EngineConfig
from ..llm import LLM


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 0},
        {"max_num_seqs": 0},
        {"kv_cache_tokens": -5},
        {"block_size": 0},
        {"tile_size": 0},
        {"dtype": "int8"},
    ],
    ids=str,
)
def test_impossible_option_is_named_with_its_value(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"^{name} must be .+, not {value}$"):
        EngineConfig(**options)


def test_auto_dtype_is_float32_on_the_cpu_and_the_checkpoint_s_elsewhere():
    assert EngineConfig(device="cpu").torch_dtype("bfloat16") == torch.float32
    assert EngineConfig(device="cuda").torch_dtype("bfloat16") == torch.bfloat16
    assert EngineConfig(device="cuda", dtype="float16").torch_dtype("bfloat16") == torch.float16


def test_max_model_len_is_bounded_by_model_and_pool(checkpoint):
    assert LLM(checkpoint).max_model_len == 64
    assert LLM(checkpoint, kv_cache_tokens=50, block_size=16).max_model_len == 48
    assert LLM(checkpoint, max_model_len=32).max_model_len == 32
    with pytest.raises(ValueError, match="max_model_len is 65, the model reads at most 64 tokens"):
        LLM(checkpoint, max_model_len=65)


def test_model_may_be_a_path(checkpoint):
    assert LLM(Path(checkpoint)).config == LLM(str(checkpoint)).config


def test_pool_has_whole_blocks_and_at_least_one(checkpoint):
    assert LLM(checkpoint, kv_cache_tokens=90, block_size=16).kv_cache_manager.num_blocks == 5
    with pytest.raises(ValueError, match="kv_cache_tokens is 15, a block has 16 slots"):
        LLM(checkpoint, kv_cache_tokens=15, block_size=16)


def test_default_pool_is_cut_into_blocks_without_a_rest():
    config = EngineConfig()
    assert config.kv_cache_tokens % config.block_size == 0
