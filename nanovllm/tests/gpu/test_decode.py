"""paged_decode beside its twin: one query a row, any split of the context."""

import pytest
import torch

from ...backends.gpu import plain
from ...backends.gpu.split import DecodeRoom
from .pools import TOLERANCE, Shape, make_pool, make_queries

decode = pytest.importorskip("nanovllm.backends.gpu.decode", reason="needs triton: make test-triton")

FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
SHAPES = [  # num_kv_heads, group, head_dim, block_size, dtype; splits; contexts, 0 for a padding row
    (Shape(1, 1, 16, 1, FLOAT), 1, [1, 7, 0]),
    (Shape(2, 4, 64, 16, BRAIN), 3, [300, 1, 0, 129]),
    (Shape(1, 8, 128, 128, HALF), 4, [127, 128, 129]),
    (Shape(3, 3, 24, 3, FLOAT), 2, [0, 200, 5]),
    (Shape(2, 5, 80, 16, BRAIN), 5, [17, 64, 65]),
    (Shape(1, 2, 256, 3, FLOAT), 7, [40, 16]),
    (Shape(1, 20, 32, 16, FLOAT), 1, [33, 130]),  # a group that is wider than what tensor cores need
]


def assert_decodes(shape: Shape, num_splits: int, context_lens: list[int], device: str, seed: int = 0) -> None:
    layer, rows = 1, len(context_lens)
    pool, q = make_pool(shape, context_lens, layer, device, seed), make_queries(shape, rows, device, seed + 1)
    room = DecodeRoom(rows + 1, q.shape[1], shape.head_dim, num_splits, device)
    room.parts.fill_(torch.nan), room.lses.fill_(torch.nan)
    before = pool.blocks.clone()
    outs = [torch.full_like(q, torch.nan) for _ in range(2)]
    for run, out in zip((decode.paged_decode, plain.paged_decode), outs, strict=True):
        run(q, pool.blocks, layer, pool.block_tables, pool.context_lens, room, out)
    tolerance = TOLERANCE[shape.dtype]
    torch.testing.assert_close(outs[0].float(), outs[1].float(), rtol=tolerance, atol=tolerance)
    assert all(not out[i].any() for out in outs for i, length in enumerate(context_lens) if length == 0)
    assert torch.equal(before.view(torch.uint8), pool.blocks.view(torch.uint8)), "a kernel that reads has written"


@pytest.mark.parametrize(("shape", "num_splits", "context_lens"), SHAPES)
def test_as_its_twin(shape: Shape, num_splits: int, context_lens: list[int], device: str) -> None:
    assert_decodes(shape, num_splits, context_lens, device)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(6, 30))])
def test_random_shapes(seed: int, device: str) -> None:
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    dtype = [FLOAT, HALF, BRAIN][seed % 3]
    shape = Shape(pick(1, 2, 3), pick(1, 2, 3, 4, 5, 6, 7, 8), pick(8, 16, 24, 64, 80, 128), pick(1, 3, 16, 128), dtype)
    lengths = torch.randint(0, 280, (3,), generator=generator).tolist()
    assert_decodes(shape, pick(1, 2, 3, 8), [*lengths, pick(0, 1, 16, 128)], device, seed)


def test_scores_whose_powers_no_float_holds(device: str) -> None:
    """Peaks are taken off before a power is: in a tile, between tiles, and between splits."""
    shape, lengths = Shape(1, 2, 16, 16, FLOAT), [300, 20]
    pool, q = make_pool(shape, lengths, 0, device, seed=0), make_queries(shape, 2, device, seed=1) * 200
    outs = [torch.empty_like(q) for _ in range(2)]
    for run, out in zip((decode.paged_decode, plain.paged_decode), outs, strict=True):
        run(q, pool.blocks, 0, pool.block_tables, pool.context_lens, DecodeRoom(2, 2, 16, 3, device), out)
    torch.testing.assert_close(*outs, rtol=1e-3, atol=1e-3)


def test_a_table_with_room_behind_its_row(device: str) -> None:
    """The runner's tables are rows of a wider buffer."""
    shape, lengths = Shape(1, 2, 16, 4, FLOAT), [9, 6]
    pool, q = make_pool(shape, lengths, 0, device, seed=0), make_queries(shape, 2, device, seed=1)
    wide = torch.full((2, 50), 2**30, dtype=torch.int32, device=device)
    wide[:, : pool.block_tables.shape[1]] = pool.block_tables
    out, expected = torch.empty_like(q), torch.empty_like(q)
    room = DecodeRoom(2, 2, 16, 2, device)
    decode.paged_decode(q, pool.blocks, 0, wide[:, :7], pool.context_lens, room, out)
    plain.paged_decode(q, pool.blocks, 0, wide[:, :7], pool.context_lens, None, expected)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.gpu
def test_a_pool_beyond_the_range_of_int32(device: str) -> None:
    if device == "cpu":
        pytest.skip("needs a CUDA device: the pool has 8 GiB")
    blocks = torch.empty(2**15 + 2, 1, 2, 64, 8, 128, dtype=BRAIN, device=device)
    blocks[-1] = torch.randn(blocks.shape[1:], device=device)
    q = torch.randn(1, 16, 128, dtype=BRAIN, device=device)
    table = torch.full((1, 1), len(blocks) - 1, dtype=torch.int32, device=device)
    length = torch.full((1,), 50, dtype=torch.int32, device=device)
    out, expected = torch.empty_like(q), torch.empty_like(q)
    decode.paged_decode(q, blocks, 0, table, length, DecodeRoom(1, 16, 128, 4, device), out)
    plain.paged_decode(q, blocks, 0, table, length, None, expected)
    torch.testing.assert_close(out, expected, rtol=3e-2, atol=3e-2)
