"""Models of random weights, the same on every machine: the one of 135M parameters, and others of a given shape.

A random model costs what a trained one costs. Each is written once a process, to a folder that goes when it ends.
"""

import atexit
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from models.training.checkpoint import write_checkpoint
from stages.s1_contiguous_cache.llama import LlamaForCausalLM, ModelConfig

STORYTELLER = Path(__file__).resolve().parents[2] / "models" / "storyteller"
SHAPE_135M = ModelConfig(  # the shape of SmolLM-135M
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    dtype="bfloat16",
    bos_token_id=1,
    eos_token_ids=(2,),
)


@cache
def random_model(config: ModelConfig) -> Path:
    """A checkpoint folder without a tokenizer: small random weights, bfloat16 in the file."""
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
    """The folder of the random model of 135M parameters."""
    return random_model(SHAPE_135M)


def storyteller_of(num_positions: int) -> Path:
    """The folder of a random model of the storyteller's shape, with room for so many tokens in a sequence."""
    return random_model(replace(ModelConfig.from_folder(STORYTELLER), max_position_embeddings=num_positions))


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the size of the keys and values of one token in all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize


def num_parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in LlamaForCausalLM(config).parameters())
