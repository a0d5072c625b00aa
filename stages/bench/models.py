"""Models with random weights, the same on every machine: one with 135M parameters, and others of a given shape.

A random model costs as much as a trained one. Each is written once per process, to a temporary folder. For the package,
a config.json is enough.
"""

import atexit
import json
import tempfile
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path

import torch

from models.training.checkpoint import write_checkpoint
from nanovllm.checkpoints.sizes import SHAPES, Shape
from stages.s1_contiguous_cache.llama import LlamaForCausalLM, ModelConfig

STORYTELLER = Path(__file__).resolve().parents[2] / "models" / "storyteller"


def published(name: str, num_positions: int) -> ModelConfig:
    """Return a published shape for `num_positions` tokens."""
    known = {field.name for field in fields(ModelConfig)}
    given = {key: value for key, value in asdict(SHAPES[name]).items() if key in known}
    return ModelConfig(**given | {"max_position_embeddings": num_positions, "bos_token_id": 1, "eos_token_ids": (2,)})


SHAPE_135M = published("smollm2-135m", 2048)


@cache
def random_model(config: ModelConfig) -> Path:
    """Return a checkpoint folder without a tokenizer: small random weights, bfloat16 in the file."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").to(torch.bfloat16)
    model.tie_weights()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
        else:
            torch.nn.init.ones_(parameter)
    write_checkpoint(model, Path(folder.name))
    return Path(folder.name)


def model_135m() -> Path:
    """Return the folder of the random model of 135M parameters."""
    return random_model(SHAPE_135M)


def storyteller_of(num_positions: int) -> Path:
    """Return the folder of a random model of the storyteller's shape, for sequences of up to `num_positions` tokens."""
    return random_model(replace(ModelConfig.from_folder(STORYTELLER), max_position_embeddings=num_positions))


@cache
def folder_of_shape(name: str) -> Path:
    """Return a checkpoint folder of a published shape: only a config.json, for engines that create random weights.

    It is removed when the process ends. `name` is one of SHAPES.
    """
    parent = tempfile.TemporaryDirectory()
    atexit.register(parent.cleanup)
    folder = Path(parent.name, name)
    folder.mkdir()
    family, architecture = family_of(SHAPES[name])
    implied = ("attention_bias", "attention_output_bias", "qk_norm")  # by the model's type
    given = {key: value for key, value in asdict(SHAPES[name]).items() if value is not None and key not in implied}
    config = given | {"model_type": family, "architectures": [f"{architecture}ForCausalLM"], "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def family_of(shape: Shape) -> tuple[str, str]:
    """Return the model type and the name of its architecture.

    >>> family_of(SHAPES["qwen3-0.6b"]), family_of(SHAPES["mistral-7b-v0.3"]), family_of(SHAPES["mistral-7b-v0.1"])
    (('qwen3', 'Qwen3'), ('llama', 'Llama'), ('mistral', 'Mistral'))
    """
    if shape.qk_norm:
        return "qwen3", "Qwen3"
    if shape.attention_bias:
        return "qwen2", "Qwen2"
    return ("mistral", "Mistral") if shape.sliding_window else ("llama", "Llama")


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize


def num_parameters(config: ModelConfig) -> int:
    """Return the number of weights, a tied embedding once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in LlamaForCausalLM(config).parameters())
