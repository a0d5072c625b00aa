"""How many sequences fit: from a model, the device's memory, a dtype and a block size."""

from typing import NamedTuple

import torch

from stages.bench.models import bytes_per_token, num_parameters
from stages.s7_cpu_offload.llama import ModelConfig

MODELS = {  # vocabulary, hidden, MLP, layers, heads, KV heads, head size
    "Llama-3.2-1B": ModelConfig(128_256, 2048, 8192, 16, 32, 8, 64, tie_word_embeddings=True),
    "Llama-2-7B": ModelConfig(32_000, 4096, 11_008, 32, 32, 32, 128),
    "Llama-3.1-8B": ModelConfig(128_256, 4096, 14_336, 32, 32, 8, 128),
    "Llama-3.1-70B": ModelConfig(128_256, 8192, 28_672, 80, 64, 8, 128),
}


class Fit(NamedTuple):
    weights: int  # bytes
    pool: int  # bytes
    blocks: int
    tokens: int  # slots of these blocks
    contiguous: int  # sequences, if each reserves max_model_len
    paged: int  # sequences, if each holds what its tokens fill


def fit(
    model: ModelConfig,
    memory: float,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    max_model_len: int = 8192,
    mean_tokens: int = 1024,
    utilization: float = 0.9,
) -> Fit:
    """`memory` in bytes, of which `utilization` is for weights and pool. ValueError if the weights do not fit."""
    weights = num_parameters(model) * dtype.itemsize
    pool = int(utilization * memory) - weights
    if pool <= 0:
        raise ValueError(f"the weights take {weights / 1e9:.1f} GB, {utilization * memory / 1e9:.1f} GB are there")
    blocks = pool // (block_size * bytes_per_token(model, dtype))
    tokens = blocks * block_size
    return Fit(weights, pool, blocks, tokens, tokens // max_model_len, blocks // -(-mean_tokens // block_size))


def table(memory: float, **options: int) -> str:
    """A row for each of MODELS; what does not fit says so."""
    rows = []
    for name, model in MODELS.items():
        try:
            f = fit(model, memory, **options)  # type: ignore[arg-type]
        except ValueError as error:
            rows.append(f"| {name} | {error} | | | | |\n")
            continue
        rows.append(
            f"| {name} | {f.weights / 1e9:.1f} GB | {f.pool / 1e9:.1f} GB: {f.blocks:,} blocks | {f.tokens:,} "
            f"| {f.contiguous:,} | {f.paged:,} |\n"
        )
    return (
        "| model | weights | pool | tokens | sequences, one piece of max_model_len each | sequences, in blocks |\n"
        "|---|---|---|---|---|---|\n" + "".join(rows)
    )
