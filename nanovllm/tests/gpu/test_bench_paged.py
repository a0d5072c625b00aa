"""nanovllm bench paged with the kernels: on a GPU in a CUDA graph, elsewhere in Triton's interpreter."""

import torch

from ...backends.gpu.ops import triton_ops
from ...bench import floor, paged
from ...bench.paged import Case
from ...checkpoints.sizes import Shape

SHAPE = Shape(
    num_hidden_layers=2,
    hidden_size=64,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=64,
    max_position_embeddings=64,
)


def test_kernel_reads_a_paged_and_a_contiguous_cache(device, monkeypatch):
    """The benchmark compares the result with plain operations, and reports a difference as a failure."""
    monkeypatch.setattr(floor, "NUM_BYTES", 1 << 16)
    monkeypatch.setattr(paged, "choose_splits", lambda *sizes: 2)  # the interpreter runs one program at a time
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    case = Case(SHAPE, 1, 2, 32, dtype, torch.device(device))
    measured, failures = paged.measure_cases([case], triton_ops(), [8, 16], 1, 1)
    assert failures == [] and [*measured] == ["blocks of 8", "blocks of 16", "contiguous", "sdpa"]
    assert all(numbers["2 x 32: us per layer"] > 0 for numbers in measured.values())
