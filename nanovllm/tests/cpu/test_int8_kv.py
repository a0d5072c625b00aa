"""Kernels that read keys and values in int8, against plain operations with the same integers."""

import random

import pytest
import torch

pytest.importorskip("numba")

from ...llama import LlamaForCausalLM, ModelConfig
from .test_runner import LONGEST, Driver, random_steps

TOLERANCE = {torch.float32: 3e-2, torch.bfloat16: 1e-1}  # of the largest logit: a number may round to the next integer


def random_model(rng: random.Random, head_dim: int, group: int, dtype: torch.dtype) -> LlamaForCausalLM:
    kv_heads = rng.choice((1, 2))
    config = ModelConfig(
        vocab_size=50, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=LONGEST, qk_norm=rng.random() < 0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)])
@pytest.mark.parametrize("workers", [1, 2])
def test_any_mix_of_tokens_gives_the_plain_logits(workers, dtype, compiled, monkeypatch):
    compiled(dtype, is_kv_int8=True)
    rng = random.Random(workers)
    torch.manual_seed(0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: workers)
    for number, head_dim in enumerate((16, 48, 64, 128)):
        group, block_size, num_seqs = rng.choice((1, 2, 3, 4, 7)), (4, 16, 12)[number % 3], rng.choice((1, 3))
        model = random_model(rng, head_dim, group, dtype)
        steps = random_steps(rng, num_seqs, 5)
        steps[:0] = [[min(700, LONGEST - sum(step[i] for step in steps)) for i in range(num_seqs)]]
        plain, fast = (Driver(model, block_size, dtype, num_seqs, is_int8=True) for _ in range(2))
        expected = plain.plain(model, steps)
        result = fast.fast(model, steps)
        print(
            head_dim,
            group,
            float((result - expected).abs().max() / expected.abs().max()),
            float((fast.written() - plain.written()).abs().max() / plain.written().abs().max()),
            float(expected.std()),
        )
        assert (result - expected).abs().max() < TOLERANCE[dtype] * expected.abs().max()
