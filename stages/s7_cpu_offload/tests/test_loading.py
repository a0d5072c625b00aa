"""A checkpoint folder becomes a model, or one error that names the file and what is wrong in it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ..llama import LlamaForCausalLM, ModelConfig, load_model
from ..llama.config import RopeScaling
from ..llm import LLM
from ..sampling import SamplingParams
from .helpers import CONFIG, next_logits, random_tensors, write_checkpoint

IDS = [1, 300, 5, 44]
Q = "model.layers.1.self_attn.q_proj.weight"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    return load_model(folder, ModelConfig.from_folder(folder), dtype, torch.device("cpu"))


def read_config(folder: Path, generation: dict | None = None, **changes) -> ModelConfig:
    """ModelConfig of CONFIG with changes; an entry changed to ... is left out."""
    config = {name: value for name, value in (CONFIG | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(folder)


# config.json


def test_what_config_json_leaves_out_is_as_in_transformers(tmp_path):
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
        mlp_bias=False,
        dtype="float32",
        eos_token_ids=(2,),
    )


def test_null_is_the_same_as_left_out(tmp_path):
    names = ("num_key_value_heads", "head_dim", "max_position_embeddings", "rope_scaling", "dtype", "eos_token_id")
    left_out = read_config(tmp_path, **dict.fromkeys(names, ...))
    assert read_config(tmp_path, **dict.fromkeys(names, None)) == left_out


def test_head_dim_need_not_be_hidden_size_over_heads(tmp_path):
    assert read_config(tmp_path, head_dim=20).head_dim == 20


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_dtype_has_an_old_and_a_new_name(tmp_path, name):
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
    assert config.rope_theta == 500.0 and config.rope_scaling == RopeScaling("llama3", **LLAMA3)


def test_linear_rope_scaling_needs_a_factor_alone(tmp_path):
    config = read_config(tmp_path, rope_scaling={"type": "linear", "factor": 4.0})
    assert config.rope_theta == 10000.0 and config.rope_scaling == RopeScaling("linear", 4.0)


def test_default_rope_parameters_scale_nothing(tmp_path):
    config = read_config(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    assert config.rope_theta == 500.0 and config.rope_scaling is None


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
def test_ends_of_text_are_read_from_generation_config_first(tmp_path, in_config, generation, eos):
    assert read_config(tmp_path, generation, eos_token_id=in_config).eos_token_ids == eos


@pytest.mark.parametrize("eos", [[113, 310], 310, [57]])
def test_any_of_several_eos_ids_ends_a_text(tmp_path, eos):
    folder = write_checkpoint(tmp_path, CONFIG | {"eos_token_id": eos})
    params = SamplingParams(temperature=0.0, max_tokens=12)
    free_run = LLM(write_checkpoint(tmp_path / "other")).generate([1], params)[0].outputs[0].token_ids
    completion = LLM(folder).generate([1], params)[0].outputs[0]
    end = min(free_run.index(i) for i in ([eos] if isinstance(eos, int) else eos))
    assert completion.token_ids == free_run[: end + 1] and completion.finish_reason == "stop"


def test_where_no_config_names_an_eos_the_tokenizer_s_counts(tmp_path, tokenizer_model):
    write_checkpoint(tmp_path, CONFIG | {"eos_token_id": None}, eos_likely(), tokenizer_model)
    params = SamplingParams(temperature=0.0, max_tokens=5)
    assert LLM(tmp_path).generate([1], params)[0].outputs[0].token_ids == [2]
    (tmp_path / "tokenizer.model").unlink()
    assert LLM(tmp_path).generate([1], params)[0].outputs[0].token_ids == [2] * 5, "now nothing is an end"


def eos_likely() -> dict[str, torch.Tensor]:
    """Tensors of a model that always says 2: every hidden state is (1, 0, 0, ...)."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in random_tensors(CONFIG).items()}
    tensors["model.embed_tokens.weight"][:, 0] = 1
    tensors["model.norm.weight"][:] = 1
    tensors["lm_head.weight"][2, 0] = 1
    return tensors


@pytest.mark.parametrize(
    "entries, error",
    [
        ({"model_type": "mistral"}, "runs LlamaForCausalLM"),
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, not gelu"),
        ({"hidden_size": ...}, "hidden_size must be a positive whole number, not None"),
        ({"vocab_size": "320"}, "vocab_size must be a positive whole number, not '320'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive whole number, not 0"),
        ({"intermediate_size": 48.5}, "intermediate_size must be a positive whole number, not 48.5"),
        ({"num_key_value_heads": 3}, "4 attention heads do not divide into 3 key-value heads"),
        ({"num_key_value_heads": 8}, "4 attention heads do not divide into 8 key-value heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive whole number, not 0"),
        ({"head_dim": 7}, "head_dim must be even, since a head is turned in pairs, not 7"),
        ({"head_dim": -8}, "head_dim must be a positive whole number, not -8"),
        ({"max_position_embeddings": "64"}, "max_position_embeddings must be a positive whole number, not '64'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not one of default, linear, llama3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' needs factor"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            "needs low_freq_factor, high_freq_factor, original_max_position_embeddings",
        ),
    ],
    ids=str,
)
def test_a_config_that_is_no_llama_is_refused_by_file_and_entry(tmp_path, entries, error):
    with pytest.raises(ValueError) as raised:
        read_config(tmp_path, **entries)
    assert str(tmp_path / "config.json") in str(raised.value) and error in str(raised.value)


@pytest.mark.parametrize(
    "data, error", [(b"{", "is not valid JSON"), (b"[1]", "holds a list"), (b"\xff", "is not valid")]
)
@pytest.mark.parametrize("name", ["config", "generation_config", "tokenizer_config", "added_tokens"])
def test_a_file_that_is_no_json_object_is_named(tmp_path, tokenizer_model, name, data, error):
    folder = write_checkpoint(tmp_path, tokenizer_model=tokenizer_model)
    (folder / f"{name}.json").write_bytes(data)
    with pytest.raises(ValueError) as raised:
        LLM(folder)
    assert str(folder / f"{name}.json") in str(raised.value) and error in str(raised.value)


# Weights that load


def test_shards_give_the_same_model_as_one_file(tmp_path):
    whole, shards = write_checkpoint(tmp_path / "whole"), write_checkpoint(tmp_path / "shards", num_shards=3)
    assert len(list(shards.glob("*.safetensors"))) == 3
    assert torch.equal(next_logits(load(shards), IDS), next_logits(load(whole), IDS))


def test_a_bfloat16_file_loads_exactly_in_float32_and_back(tmp_path):
    tensors = {name: tensor.bfloat16() for name, tensor in random_tensors(CONFIG).items()}
    model = load(write_checkpoint(tmp_path, tensors=tensors))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"].float())
    assert torch.equal(load(tmp_path, torch.bfloat16).lm_head.weight, tensors["lm_head.weight"])


def test_a_head_beside_tied_embeddings_is_left_in_the_file(tmp_path):
    config = CONFIG | {"tie_word_embeddings": True}
    tensors = random_tensors(config)
    alone = next_logits(load(write_checkpoint(tmp_path / "a", config, tensors)), IDS)
    with_head = tensors | {"lm_head.weight": torch.zeros(320, 32)}
    assert torch.equal(next_logits(load(write_checkpoint(tmp_path / "b", config, with_head)), IDS), alone)


def test_angles_that_old_files_store_are_not_needed(tmp_path):
    old = random_tensors(CONFIG) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    assert torch.equal(
        next_logits(load(write_checkpoint(tmp_path / "old", tensors=old)), IDS),
        next_logits(load(write_checkpoint(tmp_path / "new")), IDS),
    )


def test_a_loaded_model_needs_no_gradients_and_no_file(tmp_path):
    folder = write_checkpoint(tmp_path)
    model = load(folder)
    before = next_logits(model, IDS)
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(next_logits(model, IDS), before)
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())


# Weights that do not


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Rewrite the file with some tensors changed, added, or (None) taken out; `__` in a name is a dot."""
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
        ["model.safetensors", f"tensor {Q} is [32, 31], config.json makes it [32, 32]"],
    ),
    "a norm misshapen": (
        lambda f: change(f, model__norm__weight=torch.zeros(1)),
        ["model.safetensors", "tensor model.norm.weight is [1], config.json makes it [32]"],
    ),
    "a vocabulary of another size": (
        lambda f: change(f, model__embed_tokens__weight=torch.zeros(319, 32)),
        ["model.safetensors", "tensor model.embed_tokens.weight is [319, 32], config.json makes it [320, 32]"],
    ),
    "a bias that config.json does not know": (
        lambda f: change(f, model__layers__0__self_attn__q_proj__bias=torch.zeros(32)),
        ["1 tensors that Llama does not have", "model.layers.0.self_attn.q_proj.bias"],
    ),
    "a layer too many": (
        lambda f: change(f, model__layers__2__mlp__up_proj__weight=torch.zeros(48, 32)),
        ["1 tensors that Llama does not have", "model.layers.2.mlp.up_proj.weight"],
    ),
    "a file cut in its tensors": (lambda f: cut(f / "model.safetensors", 0.9), ["model.safetensors is not a whole"]),
    "a file cut in its header": (lambda f: cut(f / "model.safetensors", 0.01), ["model.safetensors is not a whole"]),
    "an empty file": (lambda f: cut(f / "model.safetensors", 0), ["model.safetensors is not a whole"]),
    "a tokenizer that is none": (
        lambda f: (f / "tokenizer.model").write_bytes(b"what"),
        ["tokenizer.model is not a sentencepiece model"],
    ),
}


@pytest.mark.parametrize("break_, errors", BROKEN.values(), ids=BROKEN)
def test_a_broken_checkpoint_is_refused_by_file_and_tensor(tmp_path, break_, errors):
    folder = write_checkpoint(tmp_path)
    break_(folder)
    with pytest.raises(ValueError) as raised:
        LLM(folder)
    assert str(folder) in str(raised.value)
    for error in errors:
        assert error in str(raised.value)


def edit_index(folder: Path, edit: Callable[[dict[str, str]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


BROKEN_SHARDS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a shard missing": (
        lambda f: (f / "model-00002-of-00003.safetensors").unlink(),
        ["the index names model-00002-of-00003.safetensors, which is not there"],
    ),
    "a shard cut": (
        lambda f: cut(f / "model-00002-of-00003.safetensors", 0.5),
        ["model-00002-of-00003.safetensors is not a whole"],
    ),
    "a tensor that the index leaves out": (
        lambda f: edit_index(f, lambda weight_map: weight_map.pop(Q)),
        [f"tensor {Q} [32, 32] is missing"],
    ),
    "a tensor that its shard does not have": (
        lambda f: edit_index(f, lambda w: w.update({Q: next(name for name in w.values() if name != w[Q])})),
        [".safetensors", f"tensor {Q} cannot be read"],
    ),
    "an index that is no JSON": (
        lambda f: (f / "model.safetensors.index.json").write_text("{"),
        ["model.safetensors.index.json is not valid JSON"],
    ),
    "an index without a map": (
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        ["tensor model.embed_tokens.weight [320, 32] is missing"],
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


def test_a_folder_that_is_none_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere is not a checkpoint folder: it has no config\.json"):
        LLM(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is not a checkpoint folder"):
        LLM(tmp_path / "file")
