"""paged_prefill beside its twin: whole prompts, chunks, and rows of a step that are not its own."""

from itertools import accumulate

import pytest
import torch

from ...backends.gpu import plain
from ...backends.gpu.split import query_tiles
from .pools import TOLERANCE, Shape, make_pool, make_queries

prefill = pytest.importorskip("nanovllm.backends.gpu.prefill", reason="needs triton: make test-triton")

FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
SHAPES = [  # num_kv_heads, group, head_dim, block_size, dtype; (context, of which are queries) of each sequence
    (Shape(1, 1, 16, 1, FLOAT), [(5, 5), (70, 70)]),
    (Shape(2, 4, 64, 16, BRAIN), [(100, 33), (17, 1), (16, 16)]),
    (Shape(1, 8, 128, 128, HALF), [(130, 3), (128, 20)]),
    (Shape(2, 3, 24, 3, FLOAT), [(40, 22), (1, 1), (23, 21)]),
    (Shape(1, 7, 80, 16, BRAIN), [(29, 19)]),
    (Shape(1, 2, 256, 3, FLOAT), [(40, 33)]),
    (Shape(1, 80, 32, 16, FLOAT), [(6, 2)]),  # a group that is wider than a program's rows
]


def assert_prefills(shape: Shape, lengths: list[tuple[int, int]], device: str, seed: int = 0) -> None:
    """Every sequence has a chunk of its last tokens; those with one token are left to decode."""
    layer, starts = 1, [0, *accumulate(query_len for _, query_len in lengths)]
    seqs = [i for i, (_, query_len) in enumerate(lengths) if query_len > 1]
    pool = make_pool(shape, [context_len for context_len, _ in lengths], layer, device, seed)
    q = make_queries(shape, starts[-1], device, seed + 1)
    tiles = torch.tensor(query_tiles(starts, seqs, shape.group), dtype=torch.int32, device=device)
    query_start_loc = torch.tensor(starts, dtype=torch.int32, device=device)
    outs = [torch.full_like(q, 7) for _ in range(2)]
    for run, out in zip((prefill.paged_prefill, plain.paged_prefill), outs, strict=True):
        run(q, pool.blocks, layer, pool.block_tables, query_start_loc, pool.context_lens, tiles, out)
    tolerance = TOLERANCE[shape.dtype]
    torch.testing.assert_close(outs[0].float(), outs[1].float(), rtol=tolerance, atol=tolerance)
    others = [starts[i] for i in range(len(lengths)) if i not in seqs]
    assert (outs[0][others] == 7).all(), "a row that has no tile was written"


@pytest.mark.parametrize(("shape", "lengths"), SHAPES)
def test_as_its_twin(shape: Shape, lengths: list[tuple[int, int]], device: str) -> None:
    assert_prefills(shape, lengths, device)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(6, 30))])
def test_random_shapes(seed: int, device: str) -> None:
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    dtype = [FLOAT, HALF, BRAIN][seed % 3]
    shape = Shape(pick(1, 2, 3), pick(1, 2, 3, 4, 5, 6, 7, 8), pick(8, 16, 24, 64, 80, 128), pick(1, 3, 16, 128), dtype)
    queries = [pick(1, 2, 3, 16, 17, 40, 64, 65) for _ in range(3)]
    lengths = [(query_len + pick(0, 0, 1, 15, 16, 100), query_len) for query_len in queries]
    if any(query_len > 1 for query_len in queries):
        assert_prefills(shape, lengths, device, seed)
