"""Checkpoint folders: each loads as a model, or gives one error that names the file and the fault."""

import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ... import host_memory
from ...checkpoints.model_config import read_model_config
from ...checkpoints.weights import load_model, weight_shapes
from ...llama import LlamaForCausalLM, ModelConfig
from ...llama.config import RopeScaling
from ...llama.weights import NoInit
from ...llm import LLM
from ...requests.sampling_params import SamplingParams
from ..testing.checkpoints import CONFIG, random_tensors, write_checkpoint
from ..testing.reference import next_logits

IDS = [1, 300, 5, 44]
Q = "model.layers.1.self_attn.q_proj.weight"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    return load_model(folder, read_model_config(folder), dtype, torch.device("cpu"))


def read_config(folder: Path, generation: dict | None = None, **changes) -> ModelConfig:
    """Return the ModelConfig of CONFIG with some entries changed. A value of ... removes the entry."""
    config = {name: value for name, value in (CONFIG | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_model_config(folder)


# config.json


def test_missing_entries_of_config_json_default_as_in_transformers(tmp_path):
    names = ("num_key_value_heads", "max_position_embeddings", "model_type", "architectures")
    config = read_config(tmp_path, **dict.fromkeys(names, ...))
    assert config == ModelConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=None,
        tie_word_embeddings=False,
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_window=None,
        dtype="float32",
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize(
    "model_type, architecture, expected",
    [
        ("mistral", "MistralForCausalLM", (32, 8, 4, 131072, 4096, False, False, False)),
        ("qwen2", "Qwen2ForCausalLM", (32, 32, 4, 32768, None, True, False, False)),
        ("qwen3", "Qwen3ForCausalLM", (32, 32, 128, 32768, None, False, False, True)),
    ],
)
def test_missing_entries_of_other_families_have_their_own_defaults(tmp_path, model_type, architecture, expected):
    """Mistral has a sliding window unless config.json says otherwise, and Qwen 3 has heads of 128."""
    entries = {"hidden_size": 128, "num_attention_heads": 32, "architectures": [architecture]}
    left_out = dict.fromkeys(("num_key_value_heads", "max_position_embeddings"), ...)
    config = read_config(tmp_path, model_type=model_type, **entries, **left_out)
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    biases = (config.attention_bias, config.attention_output_bias)
    assert (*heads, config.max_position_embeddings, config.sliding_window, *biases, config.qk_norm) == expected


def test_null_means_missing(tmp_path):
    names = ("num_key_value_heads", "head_dim", "max_position_embeddings", "rope_scaling", "dtype", "eos_token_id")
    left_out = read_config(tmp_path, **dict.fromkeys(names, ...))
    assert read_config(tmp_path, **dict.fromkeys(names, None)) == left_out


def test_head_dim_is_independent_of_hidden_size(tmp_path):
    assert read_config(tmp_path, head_dim=20).head_dim == 20


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_dtype_has_an_old_and_a_new_name(tmp_path, name):
    assert read_config(tmp_path, **{name: "bfloat16"}).dtype == "bfloat16"


@pytest.mark.parametrize(
    "entries",
    [
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}},
        {"rope_theta": 500.0, "rope_parameters": {"rope_type": "llama3", **LLAMA3}},
    ],
)
def test_rope_scaling_is_read_from_old_and_new_entries(tmp_path, entries):
    config = read_config(tmp_path, **entries)
    assert config.rope_theta == 500.0 and config.rope_scaling == RopeScaling(**LLAMA3)


def test_linear_rope_scaling_needs_only_a_factor(tmp_path):
    config = read_config(tmp_path, rope_scaling={"type": "linear", "factor": 4.0})
    assert config.rope_theta == 10000.0 and config.rope_scaling == RopeScaling(4.0)


def test_default_rope_parameters_scale_nothing(tmp_path):
    config = read_config(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    assert config.rope_theta == 500.0 and config.rope_scaling is None


def test_old_rope_entry_wins_over_the_new_one(tmp_path):
    config = read_config(tmp_path, rope_scaling={"type": "linear", "factor": 4.0}, rope_parameters={"factor": 2.0})
    assert config.rope_scaling == RopeScaling(4.0)


@pytest.mark.parametrize(
    "in_config, generation, eos",
    [
        (2, None, (2,)),
        ([2, 7], None, (2, 7)),
        (0, None, (0,)),
        (..., None, ()),
        (None, None, ()),
        (2, {"eos_token_id": 9}, (9,)),
        (2, {"eos_token_id": [9, 0]}, (9, 0)),
        (2, {"eos_token_id": 0}, (0,)),
        (2, {"eos_token_id": None}, (2,)),
        (2, {"bos_token_id": 1}, (2,)),
    ],
)
def test_eos_is_read_from_generation_config_first(tmp_path, in_config, generation, eos):
    assert read_config(tmp_path, generation, eos_token_id=in_config).eos_token_ids == eos


@pytest.mark.parametrize("eos", [[113, 310], 310, [57]])
def test_any_of_several_eos_ids_ends_a_text(tmp_path, eos):
    folder = write_checkpoint(tmp_path, CONFIG | {"eos_token_id": eos})
    params = SamplingParams(temperature=0.0, max_tokens=12)
    free_run = LLM(write_checkpoint(tmp_path / "other")).generate([1], params)[0].outputs[0].token_ids
    completion = LLM(folder).generate([1], params)[0].outputs[0]
    end = min(free_run.index(i) for i in ([eos] if isinstance(eos, int) else eos))
    assert completion.token_ids == free_run[: end + 1] and completion.finish_reason == "stop"


def test_tokenizers_eos_is_used_if_no_config_names_one(tmp_path, tokenizer_model):
    write_checkpoint(tmp_path, CONFIG | {"eos_token_id": None}, eos_likely(), tokenizer_model)
    params = SamplingParams(temperature=0.0, max_tokens=5)
    assert LLM(tmp_path).generate([1], params)[0].outputs[0].token_ids == [2]
    (tmp_path / "tokenizer.model").unlink()
    assert LLM(tmp_path).generate([1], params)[0].outputs[0].token_ids == [2] * 5, (
        "without a tokenizer, nothing ends a text"
    )


def eos_likely() -> dict[str, torch.Tensor]:
    """Return tensors of a model that always predicts token 2: every hidden state is (1, 0, 0, ...)."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in random_tensors(CONFIG).items()}
    tensors["model.embed_tokens.weight"][:, 0] = 1
    tensors["model.norm.weight"][:] = 1
    tensors["lm_head.weight"][2, 0] = 1
    return tensors


NOT_RUN_HERE: list[tuple[dict, str]] = [
    ({"model_type": "mistral"}, "unsupported model ['LlamaForCausalLM'] (model_type mistral)"),
    (
        {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
        "unsupported model ['MixtralForCausalLM'] (model_type mix",
    ),
    (
        {"model_type": "qwen3_moe"},
        "supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
    ),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ({"quantization_config": {"bits": 4, "quant_method": "gptq"}}, "quantization_config (quant_method 'gptq')"),
    ({"quantization_config": {"load_in_4bit": True}}, "quantization_config (quant_method None)"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "must all be full_attention, got 'sliding_attention'"),
    ({"num_local_experts": 8}, "num_local_experts must be 0, got 8"),
    ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
    ({"per_layer_config": {"1": {"num_attention_heads": 2}}}, "per_layer_config must be null, got {'1': {'num_att"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be null, got 50.0"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping must be null, got 30.0"),
    ({"logits_scaling": 8}, "logits_scaling must be 1, got 8"),
    ({"embedding_multiplier": 12.0}, "embedding_multiplier must be 1, got 12.0"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
    ({"rope_interleaved": True}, "rope_interleaved must be false, got True"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor must be 1, got 0.5"),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
        "rope_parameters must be the same for all layer types",
    ),
    *(
        (
            {"rope_scaling": {"rope_type": kind, "factor": 4.0}},
            f"rope type must be default, linear or llama3, got '{kind}'",
        )
        for kind in ("yarn", "dynamic", "longrope", "mrope")
    ),
    ({"rope_scaling": {"type": "su", "factor": 4.0}}, "rope type must be default, linear or llama3, got 'su'"),
]
NO_EPS: list[object] = [-1, 0, "1e-6", float("nan"), float("inf"), True, [], 10**40]
WRONG: list[tuple[dict, str]] = [
    ({"model_type": 5}, "model_type must be a string, got 5"),
    ({"model_type": ["llama"]}, "model_type must be a string, got ['llama']"),
    ({"architectures": 5}, "unsupported model 5 (model_type llama)"),
    ({"quantization_config": "gptq"}, "quantization_config must be an object, got 'gptq'"),
    ({"layer_types": "full_attention"}, "layer_types must be a list, got 'full_attention'"),
    ({"layer_types": [["full_attention"]]}, "must all be full_attention, got ['full_attention']"),
    ({"sliding_window": "16"}, "sliding_window must be a positive integer, got '16'"),
    ({"sliding_window": 0}, "sliding_window must be a positive integer, got 0"),
    ({"use_sliding_window": "no"}, "use_sliding_window must be true or false, got 'no'"),
    ({"max_window_layers": -1}, "max_window_layers must be an integer of at least 0, got -1"),
    ({"hidden_size": ...}, "hidden_size must be a positive integer, got None"),
    ({"hidden_size": True}, "hidden_size must be a positive integer, got True"),
    ({"hidden_size": {}}, "hidden_size must be a positive integer, got {}"),
    ({"hidden_size": 10**25}, f"hidden_size must be at most 16777216, got {10**25}"),
    ({"vocab_size": "320"}, "vocab_size must be a positive integer, got '320'"),
    ({"vocab_size": 10**400}, "vocab_size must be at most 16777216, got 1000"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
    ({"num_hidden_layers": 1e25}, "num_hidden_layers must be a positive integer, got 1e+25"),
    ({"num_hidden_layers": 10**25}, f"num_hidden_layers must be at most 16777216, got {10**25}"),
    ({"intermediate_size": 48.5}, "intermediate_size must be a positive integer, got 48.5"),
    ({"num_key_value_heads": 3}, "4 attention heads do not divide into 3 key-value heads"),
    ({"num_key_value_heads": 8}, "4 attention heads do not divide into 8 key-value heads"),
    ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive integer, got 0"),
    ({"head_dim": 7}, "head_dim must be even, because RoPE rotates pairs, got 7"),
    ({"head_dim": -8}, "head_dim must be a positive integer, got -8"),
    ({"max_position_embeddings": "64"}, "max_position_embeddings must be a positive integer, got '64'"),
    ({"max_position_embeddings": 10**25}, "max_position_embeddings must be at most 16777216, got 1000"),
    *(({"rms_norm_eps": eps}, f"rms_norm_eps must be a positive number, got {eps!r}") for eps in NO_EPS),
    *(
        ({"rope_theta": theta}, f"config.json: rope_theta must be a positive number, got {theta!r}")
        for theta in (-1, 0, "1e4", float("nan"), float("inf"))
    ),
    ({"rope_parameters": {"rope_theta": -1}}, "rope_parameters.rope_theta must be a positive number, got -1"),
    ({"rope_parameters": ["default"]}, "rope_parameters must be an object, got ['default']"),
    ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
    ({"rope_scaling": {"type": 5}}, "rope_scaling.type must be a string, got 5"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' needs factor"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor must be a positive number, got 0"),
    ({"rope_scaling": {"type": "linear", "factor": "4"}}, "rope_scaling.factor must be a positive number, got '4'"),
    (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        "needs low_freq_factor, high_freq_factor, original_max_position_embeddings",
    ),
    (
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
        "low_freq_factor must be less than high_freq_factor, got 1.0 and 1.0",
    ),
    (
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 32.5}},
        "rope_scaling.original_max_position_embeddings must be a positive integer, got 32.5",
    ),
    ({"tie_word_embeddings": "true"}, "tie_word_embeddings must be true or false, got 'true'"),
    ({"attention_bias": 1}, "attention_bias must be true or false, got 1"),
    ({"mlp_bias": "no"}, "mlp_bias must be true or false, got 'no'"),
    ({"dtype": ["float32"]}, "dtype must be a string, got ['float32']"),
    ({"torch_dtype": 16}, "torch_dtype must be a string, got 16"),
    ({"bos_token_id": "1"}, "bos_token_id must be an integer of at least 0, got '1'"),
    *(
        ({"eos_token_id": eos}, f"eos_token_id must be a token id or a list of token ids, got {eos!r}")
        for eos in ("2", 2.0, True, -1, ["2"], [2, None], {"id": 2})
    ),
]


@pytest.mark.parametrize("entries, error", NOT_RUN_HERE + WRONG, ids=lambda value: str(value)[:60])
def test_unsupported_config_is_named_by_file_and_entry_before_any_weight_is_read(tmp_path, entries, error):
    with pytest.raises(ValueError) as raised:
        read_config(tmp_path, **entries)
    message = str(raised.value)
    assert str(tmp_path / "config.json") in message and error in message
    assert "\n" not in message and len(message) < len(str(tmp_path)) + 260


@pytest.mark.parametrize("eos", ["2", [2, "3"], 2.5, -1])
def test_invalid_eos_is_named_by_its_file(tmp_path, eos):
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id must be a token id or a list"):
        read_config(tmp_path, {"eos_token_id": eos})
    with pytest.raises(ValueError, match=r"/config\.json: eos_token_id must be a token id or a list"):
        read_config(tmp_path, {"eos_token_id": 2}, eos_token_id=eos)


def test_entries_that_change_nothing_are_accepted(tmp_path):
    harmless = {
        "use_cache": False,
        "initializer_range": 0.1,
        "pretraining_tp": 2,
        "attention_dropout": 0.5,
        "transformers_version": "4.0",
        "pad_token_id": -1,
        "quantization_config": None,
        "layer_types": ["full_attention"] * 2,
        "final_logit_softcapping": None,
        "partial_rotary_factor": 1.0,
        "rope_interleaved": False,
        "logit_scale": 1,
    }
    assert read_config(tmp_path, **harmless) == read_config(tmp_path)


# Sliding windows


MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


@pytest.mark.parametrize(
    "entries, window",
    [
        (MISTRAL | {"sliding_window": None}, None),
        (MISTRAL | {"sliding_window": 16}, 16),
        (MISTRAL | {"sliding_window": 16, "use_sliding_window": False}, 16),  # Qwen's entries, which mean nothing here
        (MISTRAL | {"sliding_window": 16, "max_window_layers": 2}, 16),
        (QWEN2 | {"sliding_window": 16}, None),
        (QWEN2 | {"sliding_window": 16, "use_sliding_window": False}, None),
        (QWEN2 | {"sliding_window": None, "use_sliding_window": True}, None),
        (QWEN2 | {"sliding_window": 16, "use_sliding_window": True}, None),  # from layer 28 on, but there are only 2
        (QWEN2 | {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}, None),
        (QWEN2 | {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, 16),
        ({"sliding_window": 16}, 16),
    ],
)
def test_window_exists_if_any_layer_has_it(tmp_path, entries, window):
    assert read_config(tmp_path, **entries).sliding_window == window


def test_window_shorter_than_the_text_is_refused_before_any_weight_is_read(tmp_path):
    folder = write_checkpoint(tmp_path, CONFIG | MISTRAL | {"sliding_window": 16})
    config = read_model_config(folder)
    device = torch.device("cpu")
    assert load_model(folder, config, torch.float32, device, max_model_len=16), "all 16 tokens fit in the window"
    (folder / "model.safetensors").unlink()
    for max_model_len, longest in ((17, 17), (None, 64)):
        with pytest.raises(ValueError) as raised:
            load_model(folder, config, torch.float32, device, max_model_len)
        error = f"sliding_window 16 is not implemented; it needs a max_model_len of at most 16, got {longest}"
        assert str(raised.value) == f"{folder / 'config.json'}: {error}"


# Other files


@pytest.mark.parametrize(
    "data, error",
    [
        (b"{", "is not valid JSON"),
        (b"[1]", "holds a list"),
        (b"\xff", "is not valid"),
        (b'{"a": ' * 100_000, "is not valid JSON"),
    ],
    ids=["cut", "list", "no UTF-8", "deep"],
)
@pytest.mark.parametrize("name", ["config", "generation_config", "tokenizer_config", "added_tokens"])
def test_file_that_is_not_a_json_object_is_named(tmp_path, tokenizer_model, name, data, error):
    folder = write_checkpoint(tmp_path, tokenizer_model=tokenizer_model)
    (folder / f"{name}.json").write_bytes(data)
    with pytest.raises(ValueError) as raised:
        LLM(folder)
    assert str(folder / f"{name}.json") in str(raised.value) and error in str(raised.value)


@pytest.mark.parametrize(
    "name, values, error",
    [
        ("tokenizer_config", {"add_bos_token": "yes"}, "add_bos_token must be true or false, got 'yes'"),
        ("tokenizer_config", {"added_tokens_decoder": [1]}, "added_tokens_decoder must be an object, got [1]"),
        (
            "tokenizer_config",
            {"added_tokens_decoder": {"x": {}}},
            "added_tokens_decoder has the key 'x', which is not a token id",
        ),
        (
            "tokenizer_config",
            {"added_tokens_decoder": {"9" * 25: {}}},
            "has the key '9999999999999999999999999', which",
        ),
        ("tokenizer_config", {"added_tokens_decoder": {"9": "a"}}, "added_tokens_decoder.9 must be an object, got 'a'"),
        ("tokenizer_config", {"added_tokens_decoder": {"9": {}}}, "decoder.9.content must be a string, got None"),
        (
            "tokenizer_config",
            {"added_tokens_decoder": {"9": {"content": 5}}},
            "decoder.9.content must be a string, got 5",
        ),
        (
            "tokenizer_config",
            {"added_tokens_decoder": {"9": {"content": "a", "special": 1}}},
            "added_tokens_decoder.9.special must be true or false, got 1",
        ),
        ("added_tokens", {"<a>": "320"}, "<a> must be an integer of at least 0, got '320'"),
        ("added_tokens", {"<a>": 10**25}, "<a> must be at most 16777216, got 10000000"),
    ],
    ids=str,
)
def test_wrong_type_in_the_tokenizers_files_is_named(tmp_path, tokenizer_model, name, values, error):
    folder = write_checkpoint(tmp_path, tokenizer_model=tokenizer_model)
    (folder / f"{name}.json").write_text(json.dumps(values))
    with pytest.raises(ValueError) as raised:
        LLM(folder)
    assert str(folder / f"{name}.json") in str(raised.value) and error in str(raised.value)


# Weights that load


def test_shards_load_like_a_single_file(tmp_path):
    whole, shards = write_checkpoint(tmp_path / "whole"), write_checkpoint(tmp_path / "shards", num_shards=3)
    assert len(list(shards.glob("*.safetensors"))) == 3
    assert torch.equal(next_logits(load(shards), IDS), next_logits(load(whole), IDS))


def test_shards_may_be_links_out_of_the_folder(tmp_path):
    shards, snapshot = write_checkpoint(tmp_path / "blobs", num_shards=3), tmp_path / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    for path in shards.iterdir():  # as in the Hub's cache
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert torch.equal(next_logits(load(snapshot), IDS), next_logits(load(shards), IDS))


def test_bfloat16_file_loads_exactly_in_float32_and_back(tmp_path):
    tensors = {name: tensor.bfloat16() for name, tensor in random_tensors(CONFIG).items()}
    model = load(write_checkpoint(tmp_path, tensors=tensors))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"].float())
    assert torch.equal(load(tmp_path, torch.bfloat16).lm_head.weight, tensors["lm_head.weight"])


def test_separate_head_must_equal_tied_embeddings(tmp_path):
    config = CONFIG | {"tie_word_embeddings": True}
    tensors = random_tensors(config)
    alone = next_logits(load(write_checkpoint(tmp_path / "a", config, tensors)), IDS)
    head = tensors["model.embed_tokens.weight"].clone()
    same = write_checkpoint(tmp_path / "b", config, tensors | {"lm_head.weight": head})
    assert torch.equal(next_logits(load(same), IDS), alone)
    head[319, 31] += 1
    other = write_checkpoint(tmp_path / "c", config, tensors | {"lm_head.weight": head})
    with pytest.raises(ValueError) as raised:
        load(other)
    error = "lm_head.weight differs from model.embed_tokens.weight, but config.json has tie_word_embeddings true"
    assert str(raised.value) == f"{other / 'model.safetensors'}: {error}"


def test_stored_rope_angles_are_ignored(tmp_path):
    old = random_tensors(CONFIG) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    assert torch.equal(
        next_logits(load(write_checkpoint(tmp_path / "old", tensors=old)), IDS),
        next_logits(load(write_checkpoint(tmp_path / "new")), IDS),
    )


def test_loaded_model_needs_no_gradients_and_no_file(tmp_path):
    folder = write_checkpoint(tmp_path)
    model = load(folder)
    before = next_logits(model, IDS)
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(next_logits(model, IDS), before)
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors, and their peak. Mapped files do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}  # by address
        self._mapped: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type == "cpu":
            storage = result.untyped_storage()
            if func is torch.ops.aten.set_.source_Storage:
                self._mapped.add(storage.data_ptr())
            elif storage.data_ptr() not in self._mapped:
                self._live[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
            self._live = {at: (ref, size) for at, (ref, size) in self._live.items() if not ref.expired()}
            self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_loading_needs_less_than_one_tensor_beyond_the_weights(tmp_path, dtype, num_shards):
    folder = write_checkpoint(tmp_path, num_shards=num_shards)
    with LiveBytes() as memory:
        model = load(folder, dtype)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert weights <= memory.peak < weights + model.lm_head.weight.nbytes


# Absurd sizes: nothing is built


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"model_type": "qwen2", "architectures": None},
        {"model_type": "qwen3", "architectures": None, "head_dim": 16, "attention_bias": True},
    ],
)
def test_shapes_of_weights_are_those_of_the_model(tmp_path, changes):
    config = read_config(tmp_path, **changes)
    with torch.device("meta"), NoInit():
        model = LlamaForCausalLM(config)
    expected = [(name, tuple(weight.shape)) for name, weight in model.named_parameters()]
    assert sorted(weight_shapes(config)) == sorted(expected)


@contextmanager
def nothing_is_built() -> Iterator[None]:
    """Check that the block builds no module, and takes less than a megabyte for tensors and Python's objects."""
    modules: list[torch.nn.Module] = []
    build = torch.nn.Module.__init__
    with pytest.MonkeyPatch.context() as patch, LiveBytes() as tensors:
        patch.setattr(torch.nn.Module, "__init__", lambda self, *a, **k: modules.append(self) or build(self, *a, **k))
        tracemalloc.start()
        yield
        python_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert not modules and tensors.peak == 0 and python_bytes < 2**20


ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1}
EMBEDDING = "model.embed_tokens.weight has shape [320, 32], but config.json requires"
ABSURD: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 2**14}, "tensor model.layers.2.self_attn.q_proj.weight [32, 32] is missing"),
    "layers of other weights": ({"num_hidden_layers": 2**14, "mlp_bias": True}, "layers.0.mlp.gate_proj.bias [48] is"),
    "tokens": ({"vocab_size": 2**24}, f"{EMBEDDING} [16777216, 32]"),
    "a hidden size": ({"hidden_size": 2**24}, f"{EMBEDDING} [320, 16777216]"),
    "an MLP": ({"intermediate_size": 2**24}, "gate_proj.weight has shape [48, 32], but config.json requires [16777216"),
    "heads": (
        {"num_attention_heads": 2**24, "head_dim": 2**24},
        f"q_proj.weight has shape [32, 32], but config.json requires [{2**48}, 32]",
    ),
    "positions": (
        {"max_position_embeddings": 2**24},
        "16,777,216 positions need 4,294,967,296 bytes",
    ),
}


@pytest.mark.parametrize("entries, error", ABSURD.values(), ids=ABSURD)
def test_absurd_size_is_an_error_before_anything_is_built(tmp_path, entries, error):
    folder = write_checkpoint(tmp_path, CONFIG | ONE_HEAD)
    config = read_config(folder, **ONE_HEAD | entries)
    with nothing_is_built(), pytest.raises(ValueError) as raised:
        load_model(folder, config, torch.float32, torch.device("cpu"))
    assert str(folder) in str(raised.value) and error in str(raised.value)


def test_model_of_too_many_positions_loads_for_shorter_texts(tmp_path):
    changes = ONE_HEAD | {"max_position_embeddings": 2**24}
    model = LLM(write_checkpoint(tmp_path, CONFIG | changes), max_model_len=64, offload_policy="load")
    assert model.generate([IDS], SamplingParams(max_tokens=2, ignore_eos=True))[0].error is None


@pytest.mark.parametrize("pool", [{"kv_cache_tokens": 2**23}, {"kv_offloading_tokens": 2**23, "kv_cache_tokens": 64}])
def test_pool_is_compared_with_the_memory_before_it_is_allocated(tmp_path, monkeypatch, pool):
    monkeypatch.setattr(host_memory, "host_memory", lambda: host_memory.HostMemory(2**30, 2**30))
    folder = write_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"has no room for a pool of 524,288 blocks, 2,147,483,648 bytes"):
        LLM(folder, offload_policy="load", **pool)


# Broken weights


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Rewrite the file with some tensors changed, added or, with None, removed. `__` in a name stands for a dot."""
    changed = random_tensors(CONFIG) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, folder / "model.safetensors")


def cut(path: Path, keep: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data))])


BROKEN: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no file": (lambda f: (f / "model.safetensors").unlink(), ["no model.safetensors and no model.safetensors.index"]),
    "a tensor missing": (lambda f: change(f, **{Q: None}), [f"tensor {Q} [32, 32] is missing"]),
    "the head missing, and not tied": (
        lambda f: change(f, lm_head__weight=None),
        ["tensor lm_head.weight [320, 32] is missing"],
    ),
    "a tensor misshapen": (
        lambda f: change(f, **{Q: torch.zeros(32, 31)}),
        ["model.safetensors", f"tensor {Q} has shape [32, 31], but config.json requires [32, 32]"],
    ),
    "a norm misshapen": (
        lambda f: change(f, model__norm__weight=torch.zeros(1)),
        ["model.safetensors", "tensor model.norm.weight has shape [1], but config.json requires [32]"],
    ),
    "a vocabulary of another size": (
        lambda f: change(f, model__embed_tokens__weight=torch.zeros(319, 32)),
        [
            "model.safetensors",
            "tensor model.embed_tokens.weight has shape [319, 32], but config.json requires [320, 32]",
        ],
    ),
    "a bias that config.json does not know": (
        lambda f: change(f, model__layers__0__self_attn__q_proj__bias=torch.zeros(32)),
        ["the model of config.json does not have", "unexpected tensor model.layers.0.self_attn.q_proj.bias"],
    ),
    "a layer too many": (
        lambda f: change(f, model__layers__2__mlp__up_proj__weight=torch.zeros(48, 32)),
        ["the model of config.json does not have", "unexpected tensor model.layers.2.mlp.up_proj.weight"],
    ),
    "whole numbers for weights": (
        lambda f: change(f, **{Q: torch.zeros(32, 32, dtype=torch.int8)}),
        ["model.safetensors", f"tensor {Q} must be floating point, got torch.int8"],
    ),
    "a folder in place of a file": (
        lambda f: make_folder(f / "model.safetensors"),
        ["no model.safetensors and no model.safetensors.index"],
    ),
    "a file cut in its tensors": (lambda f: cut(f / "model.safetensors", 0.9), ["model.safetensors is not a complete"]),
    "a file cut in its header": (lambda f: cut(f / "model.safetensors", 0.01), ["model.safetensors is not a complete"]),
    "an empty file": (lambda f: cut(f / "model.safetensors", 0), ["model.safetensors is not a complete"]),
    "an invalid tokenizer": (
        lambda f: (f / "tokenizer.model").write_bytes(b"what"),
        ["tokenizer.model is not a sentencepiece model"],
    ),
}


@pytest.mark.parametrize("break_, errors", BROKEN.values(), ids=BROKEN)
def test_broken_checkpoint_is_refused_by_file_and_tensor(tmp_path, break_, errors):
    folder = write_checkpoint(tmp_path)
    break_(folder)
    with pytest.raises(ValueError) as raised:
        LLM(folder)
    assert str(folder) in str(raised.value)
    for error in errors:
        assert error in str(raised.value)


def make_folder(file: Path) -> None:
    """Replace the file with a folder."""
    file.unlink()
    file.mkdir()


def edit_index(folder: Path, edit: Callable[[dict[str, object]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


BROKEN_SHARDS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a shard missing": (
        lambda f: (f / "model-00002-of-00003.safetensors").unlink(),
        ["model-00002-of-00003.safetensors is missing, but the index lists it"],
    ),
    "a shard cut": (
        lambda f: cut(f / "model-00002-of-00003.safetensors", 0.5),
        ["model-00002-of-00003.safetensors is not a complete"],
    ),
    "a tensor that the index leaves out": (
        lambda f: edit_index(f, lambda weight_map: weight_map.pop(Q)),
        [f"tensor {Q} [32, 32] is missing"],
    ),
    "a tensor that its shard does not have": (
        lambda f: edit_index(f, lambda w: w.update({Q: next(name for name in w.values() if name != w[Q])})),
        [".safetensors", f"tensor {Q} cannot be read"],
    ),
    "an index that is not JSON": (
        lambda f: (f / "model.safetensors.index.json").write_text("{"),
        ["model.safetensors.index.json is not valid JSON"],
    ),
    "an index without a map": (
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        ["tensor model.embed_tokens.weight [320, 32] is missing"],
    ),
    "an invalid map": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": ["model.safetensors"]}'),
        ["model.safetensors.index.json: weight_map must be an object, got ['model.safetensors']"],
    ),
    "a map to something other than a name": (
        lambda f: edit_index(f, lambda weight_map: weight_map.update({Q: 2})),
        [f"model.safetensors.index.json: weight_map.{Q} must be a string, got 2"],
    ),
    "a map to nothing": (
        lambda f: edit_index(f, lambda weight_map: weight_map.update({Q: None})),
        [f"model.safetensors.index.json: weight_map.{Q} must be a string, got None"],
    ),
    "a map out of the folder": (
        lambda f: edit_index(f, lambda weight_map: weight_map.update({Q: f"../{f.name}/{weight_map[Q]}"})),
        [f"model.safetensors.index.json: weight_map.{Q} must be a file in the folder, got '../"],
    ),
    "a map to an absolute path": (
        lambda f: edit_index(f, lambda weight_map: weight_map.update({Q: str(f / weight_map[Q])})),
        [f"model.safetensors.index.json: weight_map.{Q} must be a file in the folder, got '/"],
    ),
    "a map to a folder": (
        lambda f: edit_index(f, lambda weight_map: weight_map.update({Q: "."})),
        [". is missing, but the index lists it"],
    ),
}


@pytest.mark.parametrize("break_, errors", BROKEN_SHARDS.values(), ids=BROKEN_SHARDS)
def test_broken_shards_are_refused_by_file_and_tensor(tmp_path, break_, errors):
    folder = write_checkpoint(tmp_path, num_shards=3)
    break_(folder)
    with pytest.raises(ValueError) as raised:
        LLM(folder)
    assert str(folder) in str(raised.value)
    for error in errors:
        assert error in str(raised.value)


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"^the folder .*nowhere does not exist"):
        LLM(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file, not a checkpoint folder"):
        LLM(tmp_path / "file")
