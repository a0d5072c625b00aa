"""EngineConfig: the options of the engine."""

from dataclasses import dataclass, field
from typing import Any

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def option(default: Any, help: str) -> Any:
    """Return a dataclass field that is also a flag of the command line."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class EngineConfig:
    """The options of an engine."""

    model: str = option("models/storyteller", "checkpoint folder: config.json, *.safetensors, tokenizer.model")
    device: str = option("cpu", "cpu, cuda or mps")
    dtype: str = option("auto", "float32, bfloat16 or float16; auto: float32 on the CPU, elsewhere the checkpoint's")
    max_model_len: int | None = option(None, "longest prompt + output in tokens; default: what model and pool allow")
    max_num_seqs: int = option(32, "maximum number of sequences that run at a time")
    max_num_batched_tokens: int = option(512, "maximum number of tokens in a step; longer prompts come in chunks")
    watermark: float = option(0.05, "share of the blocks that stay free when a sequence is admitted beside others")
    block_size: int = option(16, "slots in a block of the KV cache")
    tile_size: int = option(4096, "slots that attention reads at a time, of all sequences together")
    kv_cache_tokens: int = option(8192, "size of the KV cache in slots; a slot holds one token")
    seed: int = option(0, "seeds the requests that have no seed of their own")

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid value."""
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype must be auto or one of {', '.join(DTYPES)}, not {self.dtype}")
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "tile_size",
            "kv_cache_tokens",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be 0 or above and below 1, not {self.watermark}")
        if self.kv_cache_tokens < self.block_size:
            raise ValueError(f"kv_cache_tokens is {self.kv_cache_tokens}, a block has {self.block_size} slots")

    def torch_dtype(self, checkpoint_dtype: str) -> torch.dtype:
        """Return the dtype of weights, keys and values."""
        if self.dtype != "auto":
            return DTYPES[self.dtype]
        return torch.float32 if self.device == "cpu" else DTYPES[checkpoint_dtype]
