"""Checkpoints: config.json and safetensors, in the forms that Llama's relatives are published in."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ..llama import LlamaForCausalLM, ModelConfig, load_model
from ..llama.config import RopeScaling
from ..llm import LLM
from .helpers import CONFIG, next_logits, random_tensors, write_checkpoint

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def read(folder: Path, **entries: object) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(CONFIG | entries))
    return ModelConfig.from_folder(folder)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    return load_model(folder, ModelConfig.from_folder(folder), dtype, torch.device("cpu"))


# config.json


def test_entries_that_are_missing_or_null_have_their_defaults(tmp_path):
    del (config := dict(CONFIG))["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": None, "rope_scaling": None}))
    model = ModelConfig.from_folder(tmp_path)
    assert (model.num_key_value_heads, model.head_dim, model.rope_theta, model.rope_scaling) == (4, 8, 10000.0, None)
    assert (model.rms_norm_eps, model.tie_word_embeddings, model.dtype) == (1e-6, False, "float32")


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_dtype_has_an_old_and_a_new_name(tmp_path, name):
    assert read(tmp_path, **{name: "bfloat16"}).dtype == "bfloat16"


@pytest.mark.parametrize(
    "entries, scaling",
    [
        ({"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, RopeScaling(8.0, 1.0, 4.0, 32)),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}}, RopeScaling(8.0, 1.0, 4.0, 32)),
        ({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}}, RopeScaling(4.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, None),
    ],
    ids=["llama3 until transformers 5", "llama3 since", "linear", "default"],
)
def test_rope_is_read_from_old_and_new_entries(tmp_path, entries, scaling):
    model = read(tmp_path, **entries)
    assert (model.rope_theta, model.rope_scaling) == (500.0, scaling)


@pytest.mark.parametrize(
    "generation, eos", [(None, (2,)), ({"eos_token_id": [4, 5]}, (4, 5)), ({"temperature": 1}, (2,))]
)
def test_generation_config_overrides_the_end_of_text(tmp_path, generation, eos):
    if generation:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read(tmp_path).eos_token_ids == eos


@pytest.mark.parametrize(
    "entries",
    [
        {"model_type": "gemma"},
        {"rope_scaling": {"rope_type": "yarn"}},
        {"quantization_config": {"quant_method": "awq"}},
    ],
    ids=str,
)
def test_other_models_are_unsupported(tmp_path, entries):
    with pytest.raises(ValueError, match=r"unsupported model: .*(gemma|yarn|'quantized': True).*; supported: "):
        read(tmp_path, **entries)


def test_folder_without_a_config_is_not_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} is not a checkpoint folder"):
        LLM(tmp_path)


def test_text_is_no_longer_than_a_sliding_window(tmp_path):
    folder = write_checkpoint(tmp_path, CONFIG | {"model_type": "mistral", "sliding_window": 20})
    assert LLM(folder).max_model_len == 20
    with pytest.raises(ValueError, match="max_model_len is 21, the model reads at most 20 tokens"):
        LLM(folder, max_model_len=21)
    assert read(tmp_path, model_type="qwen2", sliding_window=20, use_sliding_window=False).max_context_len == 64


# Weights


def test_shards_give_the_same_model_as_one_file(tmp_path):
    one, three = write_checkpoint(tmp_path / "one"), write_checkpoint(tmp_path / "three", num_shards=3)
    assert torch.equal(next_logits(load(one), [1, 5]), next_logits(load(three), [1, 5]))


def test_bfloat16_weights_are_exact_in_float32(tmp_path):
    tensors = {name: tensor.bfloat16() for name, tensor in random_tensors(CONFIG).items()}
    folder = write_checkpoint(tmp_path, tensors=tensors)
    wide, narrow = load(folder), load(folder, torch.bfloat16)
    assert wide.lm_head.weight.dtype == torch.float32 and narrow.lm_head.weight.dtype == torch.bfloat16
    for parameter, other in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert torch.equal(parameter.bfloat16(), other) and not parameter.requires_grad


def test_tensors_that_config_json_already_gives_are_ignored(tmp_path):
    """The head beside tied embeddings, and the angles that old checkpoints store."""
    tensors = random_tensors(config := CONFIG | {"tie_word_embeddings": True})
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    model = load(write_checkpoint(tmp_path, config, tensors))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_missing_and_unknown_tensors_are_named(tmp_path):
    file = write_checkpoint(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, file)
    with pytest.raises(ValueError, match=r"config\.json has no tensor model\.layers\.0\.self_attn\.q_norm\.weight"):
        load(tmp_path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load(tmp_path)


def test_tensor_of_a_wrong_shape_is_named(tmp_path):
    tensors = random_tensors(CONFIG) | {"model.norm.weight": torch.ones(31)}
    with pytest.raises(RuntimeError, match=r"size mismatch for model\.norm\.weight"):
        load(write_checkpoint(tmp_path, tensors=tensors))
