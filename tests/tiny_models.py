"""Tiny random models of every family and shape that config.json can describe, saved by transformers itself."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.helpers import Oracle

PLAIN = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
# Positions go up to 92, past the original 32. A head has 8 frequencies: 3 are kept, 1 is blended and 4 are divided.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
NEAR = {"rope_type": "default", "rope_theta": 500.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

# What differs from PLAIN, by name. "_old", "_shards" and "_dtype" say how to write the folder.
SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "mqa": {"num_key_value_heads": 1},
    "mha": {"num_key_value_heads": 4},
    "wide_heads": {"head_dim": 20},  # 4 x 20 on a hidden size of 48
    "narrow_heads": {"head_dim": 6, "num_attention_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "llama3": {"head_dim": 16, "rope_parameters": LLAMA3},
    "linear": {"rope_parameters": LINEAR},
    "theta_and_eps": {"rope_parameters": NEAR, "rms_norm_eps": 0.05},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True, "num_hidden_layers": 3},
    "shards": {"num_hidden_layers": 3, "_shards": "20KB"},
    "tied_shards_bfloat16": {"tie_word_embeddings": True, "_shards": "20KB", "_dtype": "bfloat16"},
    "old_plain": {"num_key_value_heads": 4, "rope_parameters": NEAR, "_old": True},
    "old_llama3": {"head_dim": 16, "rope_parameters": LLAMA3, "_old": True},
    "old_linear": {"rope_parameters": LINEAR, "_old": True, "_dtype": "float16"},
    "one_layer": {"num_hidden_layers": 1, "hidden_size": 30, "num_attention_heads": 3, "num_key_value_heads": 3},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 20},
    "mistral_long_window": {"model_type": "mistral", "sliding_window": 256},  # as many as there are positions
    "qwen2": {"model_type": "qwen2", "rope_parameters": NEAR, "sliding_window": 8, "max_window_layers": 0},
    "qwen2_tied": {"model_type": "qwen2", "tie_word_embeddings": True, "_shards": "20KB"},
    "qwen3": {"model_type": "qwen3", "head_dim": 20, "rms_norm_eps": 0.05},
    "qwen3_bias": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    "old_qwen3": {"model_type": "qwen3", "head_dim": 6, "rope_parameters": LINEAR, "_old": True},
}


@dataclass(frozen=True)
class TinyModel:
    """A checkpoint folder, and transformers' model of it."""

    folder: Path
    oracle: Oracle

    @contextmanager
    def ending_at(self, eos_ids: list[int]) -> Iterator[Path]:
        """Yield the folder with these EOS ids in its generation_config.json."""
        path = self.folder / "generation_config.json"
        before = path.read_text()
        path.write_text(json.dumps({"eos_token_id": eos_ids}))
        try:
            yield self.folder
        finally:
            path.write_text(before)


def write_tiny_model(name: str, folder: Path) -> TinyModel:
    """Write the model `name` of SHAPES to a folder. Its random weights are the same each time."""
    shape = PLAIN | SHAPES[name]
    is_old, shards, dtype = shape.pop("_old", False), shape.pop("_shards", "1GB"), shape.pop("_dtype", "float32")
    torch.manual_seed(sum(name.encode()))
    config = AutoConfig.for_model(shape.pop("model_type", "llama"), **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    spread(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shards)
    assert (folder / "model.safetensors.index.json").exists() == (shards != "1GB")
    if is_old:
        write_old_config(folder / "config.json")
    return TinyModel(folder, Oracle(folder))


@torch.no_grad()
def spread(model: PreTrainedModel) -> None:
    """Make weights as varied as a trained model's.

    transformers initializes them so small, with zeros and ones for biases and norms, that all texts have the same next
    token.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=0.5)
        elif parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5)
        elif "embed_tokens" in name:
            parameter.normal_()
        else:
            parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)


def write_old_config(path: Path) -> None:
    """Rewrite config.json as transformers 4 would, without entries that have their default."""
    config = json.loads(path.read_text())
    rope, dtype = config.pop("rope_parameters"), config.pop("dtype")
    config |= {"torch_dtype": dtype, "rope_theta": rope.pop("rope_theta"), "rope_scaling": None}
    rope_type = rope.pop("rope_type")
    if rope_type == "linear":
        config["rope_scaling"] = {"type": "linear", **rope}
    elif rope_type == "llama3":
        config["rope_scaling"] = {"rope_type": "llama3", **rope}
    if config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]:
        del config["head_dim"]
    if config["num_key_value_heads"] == config["num_attention_heads"]:
        del config["num_key_value_heads"]
    for name in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        if not config.get(name, True):
            del config[name]
    path.write_text(json.dumps(config))


def random_prompts(vocab_size: int, num: int, longest: int) -> list[list[int]]:
    """Return random prompts. The first three have 1, 2 and `longest` tokens."""
    rng = random.Random(num)
    lengths = [1, 2, longest] + [rng.randint(1, longest) for _ in range(num)]
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths[:num]]
