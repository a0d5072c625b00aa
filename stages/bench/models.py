"""Models with random weights, the same on every machine: one with 135M parameters, and others of a given shape.

A random model costs as much as a trained one. Each is written once per process, to a temporary folder.
"""

import atexit
import tempfile
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path

import torch

from models.training.checkpoint import write_checkpoint
from nanovllm.checkpoints.sizes import SHAPES
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


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize


def num_parameters(config: ModelConfig) -> int:
    """Return the number of weights, a tied embedding once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in LlamaForCausalLM(config).parameters())
