"""python -m stages.bench paged with the kernels: on a GPU in a CUDA graph, elsewhere in Triton's interpreter."""

import inspect

import pytest
import torch

from nanovllm.backends.gpu import plain
from nanovllm.backends.gpu.ops import PLAIN, triton_ops
from nanovllm.bench import floor
from nanovllm.checkpoints.sizes import Shape
from stages.bench import paged
from stages.bench.paged import Case

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


def test_varlen_attention_gets_the_blocks_in_the_layout_that_it_documents(monkeypatch):
    """A stand-in computes what torch documents. The result is compared with plain operations."""

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, seqused_k, block_table, **options):
        assert cu_seq_q.tolist() == [0, 1, 2, 3] and cu_seq_k is None and (max_q, max_k) == (1, 512)
        assert options == {"enable_gqa": True, "num_splits": 1} and key.shape[1] == paged.VARLEN_BLOCK_SIZE
        out = torch.empty_like(query)
        for seq, length in enumerate(seqused_k.tolist()):
            k, v = (each[block_table[seq].long()].flatten(0, 1)[:length] for each in (key, value))
            out[seq] = plain.attend(query[seq : seq + 1], k, v)[0]
        return out

    monkeypatch.setattr(paged, "varlen_attn", varlen_attn)
    attention = paged.Attention(Case(SHAPE, 2, 3, 512, torch.float32, torch.device("cpu")), PLAIN)
    way = attention.varlen()
    way.call()
    attention.check(way)


@pytest.mark.parametrize(("device", "dtype", "context"), [("cpu", "bfloat16", 512), ("cuda", "float32", 512)])
def test_varlen_attention_is_left_out_where_it_cannot_run(device, dtype, context):
    case = Case(SHAPE, 2, 3, context, getattr(torch, dtype), torch.device(device))
    assert not paged.has_varlen(case)
    takes_tables = "block_table" in inspect.signature(paged.varlen_attn).parameters
    assert paged.has_varlen(case._replace(device=torch.device("cuda"), dtype=torch.bfloat16)) == takes_tables
    assert not paged.has_varlen(case._replace(device=torch.device("cuda"), dtype=torch.bfloat16, context=300))


def test_kernel_reads_a_paged_and_a_contiguous_cache(device, monkeypatch):
    """The benchmark compares the result with plain operations, and reports a difference as a failure."""
    monkeypatch.setattr(floor, "NUM_BYTES", 1 << 16)
    monkeypatch.setattr(paged, "choose_splits", lambda *sizes: 2)  # the interpreter runs one program at a time
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    case = Case(SHAPE, 1, 2, 32, dtype, torch.device(device))
    measured, failures = paged.measure_cases([case], triton_ops(), [8, 16], 1, 1)
    assert failures == [] and [*measured] == ["blocks of 8", "blocks of 16", "contiguous", "sdpa"]
    assert all(numbers["2 x 32: us per layer"] > 0 for numbers in measured.values())
