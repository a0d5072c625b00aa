"""paged_decode and paged_prefill compared with their plain versions."""

from itertools import accumulate

import pytest
import torch

from ...backends.gpu import plain
from ...backends.gpu.ops import triton_ops
from ...backends.gpu.tiles import PREFILL_ROWS, DecodeWorkspace, Pace, paces, queries_per_tile, query_tiles
from .pools import DTYPES, TOLERANCE, KernelShape, decodes_of, make_pool, make_queries, pick, random_shape

FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(6, 12))]


# Decode


def longest_first(context_lens: list[int]) -> list[int]:
    return sorted(range(len(context_lens)), key=lambda row: -context_lens[row])


def check_decode(shape: KernelShape, num_splits: int, context_lens: list[int], device: str, seed: int = 0) -> None:
    layer, rows = 1, len(context_lens)
    pool, q = make_pool(shape, context_lens, layer, device, seed), make_queries(shape, rows, device, seed + 1)
    workspace = DecodeWorkspace(rows + 1, q.shape[1], shape.head_dim, num_splits, device)
    workspace.parts.fill_(torch.nan), workspace.lses.fill_(torch.nan)
    before = pool.blocks.clone()
    outs = [torch.full_like(q, torch.nan) for _ in range(2)]
    decodes = decodes_of(pool.block_tables, pool.context_lens, workspace, longest_first(context_lens))
    for run, out in zip((triton_ops().paged_decode, plain.paged_decode), outs, strict=True):
        run(q, pool.blocks, layer, decodes, out)
    tolerance = TOLERANCE[shape.dtype]
    torch.testing.assert_close(outs[0].float(), outs[1].float(), rtol=tolerance, atol=tolerance)
    assert all(not out[i].any() for out in outs for i, length in enumerate(context_lens) if length == 0)
    assert torch.equal(before.view(torch.uint8), pool.blocks.view(torch.uint8)), "decode wrote to the pool"


@pytest.mark.parametrize(
    ("shape", "num_splits", "context_lens"),
    [
        (KernelShape(1, 1, 16, 1, FLOAT), 1, [1, 7, 0]),  # context length 0 is a padding row
        (KernelShape(2, 4, 64, 16, BRAIN), 3, [300, 1, 0, 129]),
        (KernelShape(1, 8, 128, 128, HALF), 4, [127, 128, 129]),
        (KernelShape(3, 3, 24, 3, FLOAT), 2, [0, 200, 5]),
        (KernelShape(2, 5, 80, 16, BRAIN), 5, [17, 64, 65]),
        (KernelShape(1, 2, 256, 3, FLOAT), 7, [40, 16]),
        (KernelShape(1, 20, 32, 16, FLOAT), 1, [33, 130]),  # a group wider than tensor cores need
        (KernelShape(2, 4, 64, 16, BRAIN, "fp8"), 3, [300, 1, 0, 129]),
        (KernelShape(3, 3, 24, 3, FLOAT, "fp8"), 2, [0, 200, 5]),
        (KernelShape(2, 4, 64, 16, HALF, "int8"), 3, [300, 1, 0, 129]),
        (KernelShape(2, 5, 80, 4, FLOAT, "int8"), 1, [17, 64, 65]),
    ],
)
def test_decode_matches_plain_attention(
    shape: KernelShape, num_splits: int, context_lens: list[int], device: str
) -> None:
    check_decode(shape, num_splits, context_lens, device)


@pytest.mark.parametrize("seed", SEEDS)
def test_decode_matches_plain_attention_for_random_shapes(seed: int, device: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = random_shape(generator, DTYPES[seed % 3])
    lengths = torch.randint(0, 280, (3,), generator=generator).tolist()
    num_splits = pick(generator, 1, 2, 3, 8)
    check_decode(shape, num_splits, [*lengths, pick(generator, 0, 1, 16, 128)], device, seed)


def test_decode_survives_scores_whose_exponentials_overflow(device: str) -> None:
    """Peaks are subtracted before exponentials are taken: within a tile, between tiles and between splits."""
    shape, lengths = KernelShape(1, 2, 16, 16, FLOAT), [300, 20]
    pool, q = make_pool(shape, lengths, 0, device, seed=0), make_queries(shape, 2, device, seed=1) * 200
    outs = [torch.empty_like(q) for _ in range(2)]
    decodes = decodes_of(pool.block_tables, pool.context_lens, DecodeWorkspace(2, 2, 16, 3, device))
    for run, out in zip((triton_ops().paged_decode, plain.paged_decode), outs, strict=True):
        run(q, pool.blocks, 0, decodes, out)
    torch.testing.assert_close(*outs, rtol=1e-3, atol=1e-3)


def test_block_tables_may_be_part_of_a_wider_buffer(device: str) -> None:
    shape, lengths = KernelShape(1, 2, 16, 4, FLOAT), [9, 6]
    pool, q = make_pool(shape, lengths, 0, device, seed=0), make_queries(shape, 2, device, seed=1)
    wide = torch.full((2, 50), 2**30, dtype=torch.int32, device=device)
    wide[:, : pool.block_tables.shape[1]] = pool.block_tables
    out, expected = torch.empty_like(q), torch.empty_like(q)
    decodes = decodes_of(wide[:, :7], pool.context_lens, DecodeWorkspace(2, 2, 16, 2, device))
    triton_ops().paged_decode(q, pool.blocks, 0, decodes, out)
    plain.paged_decode(q, pool.blocks, 0, decodes, expected)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_decode_leaves_the_rows_of_other_sequences_alone(num_splits: int, device: str) -> None:
    """A step has rows 0 to 4. Rows 3 and 1 decode, with the tables 0 and 2."""
    shape, lengths = KernelShape(2, 2, 16, 4, FLOAT), [70, 5, 33]
    pool, q = make_pool(shape, lengths, 0, device, seed=0), make_queries(shape, 5, device, seed=1)
    rows, indices = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32, device=device)
    workspace = DecodeWorkspace(2, 4, 16, num_splits, device)
    decodes = plain.DecodeMetadata(pool.block_tables, pool.context_lens[[0, 2]], workspace, rows, indices)
    outs = [torch.full_like(q, 7) for _ in range(2)]
    for run, out in zip((triton_ops().paged_decode, plain.paged_decode), outs, strict=True):
        run(q, pool.blocks, 0, decodes, out)
    torch.testing.assert_close(*outs, rtol=2e-5, atol=2e-5)
    assert (outs[0][[0, 2, 4]] == 7).all() and not (outs[0][[1, 3]] == 7).any()


@pytest.mark.gpu
def test_decode_reads_pools_beyond_the_range_of_int32(device: str) -> None:
    if device == "cpu":
        pytest.skip("needs a CUDA device: the pool has 8 GiB")
    blocks = torch.empty(2**15 + 2, 1, 2, 64, 8, 128, dtype=BRAIN, device=device)
    blocks[-1] = torch.randn(blocks.shape[1:], device=device)
    q = torch.randn(1, 16, 128, dtype=BRAIN, device=device)
    table = torch.full((1, 1), len(blocks) - 1, dtype=torch.int32, device=device)
    length = torch.full((1,), 50, dtype=torch.int32, device=device)
    out, expected = torch.empty_like(q), torch.empty_like(q)
    decodes = decodes_of(table, length, DecodeWorkspace(1, 16, 128, 4, device))
    triton_ops().paged_decode(q, blocks, 0, decodes, out)
    plain.paged_decode(q, blocks, 0, decodes, expected)
    torch.testing.assert_close(out, expected, rtol=3e-2, atol=3e-2)


# Prefill


def check_prefill(shape: KernelShape, lengths: list[tuple[int, int]], device: str, seed: int = 0) -> None:
    """Compare a step of these (context_len, query_len) pairs. Sequences with one query are left to decode."""
    layer, starts = 1, [0, *accumulate(query_len for _, query_len in lengths)]
    seqs = [i for i, (_, query_len) in enumerate(lengths) if query_len > 1]
    pool = make_pool(shape, [context_len for context_len, _ in lengths], layer, device, seed)
    q = make_queries(shape, starts[-1], device, seed + 1)
    rows = PREFILL_ROWS[seed % 2]
    pairs = query_tiles(starts, [context_len for context_len, _ in lengths], seqs, queries_per_tile(rows, shape.group))
    tiles, query_start_loc = (torch.tensor(each, dtype=torch.int32, device=device) for each in (pairs, starts))
    prefills = plain.PrefillMetadata(pool.block_tables, query_start_loc, pool.context_lens, tiles, rows)
    outs = [torch.full_like(q, 7) for _ in range(2)]
    for run, out in zip((triton_ops().paged_prefill, plain.paged_prefill), outs, strict=True):
        run(q, pool.blocks, layer, prefills, out)
    tolerance = TOLERANCE[shape.dtype]
    torch.testing.assert_close(outs[0].float(), outs[1].float(), rtol=tolerance, atol=tolerance)
    others = [starts[i] for i in range(len(lengths)) if i not in seqs]
    assert (outs[0][others] == 7).all(), "prefill wrote to the row of a decode"


@pytest.mark.parametrize(
    ("shape", "lengths"),  # context_len and query_len of each sequence
    [
        (KernelShape(1, 1, 16, 1, FLOAT), [(5, 5), (70, 70)]),
        (KernelShape(2, 4, 64, 16, BRAIN), [(100, 33), (17, 1), (16, 16)]),
        (KernelShape(1, 8, 128, 128, HALF), [(130, 3), (128, 20)]),
        (KernelShape(2, 3, 24, 3, FLOAT), [(40, 22), (1, 1), (23, 21)]),
        (KernelShape(1, 7, 80, 16, BRAIN), [(29, 19)]),
        (KernelShape(1, 2, 256, 3, FLOAT), [(40, 33)]),
        (KernelShape(1, 80, 32, 16, FLOAT), [(6, 2)]),  # a group wider than a program's rows
        (KernelShape(2, 4, 64, 16, BRAIN, "fp8"), [(100, 33), (17, 1), (16, 16)]),
        (KernelShape(2, 3, 24, 3, FLOAT, "fp8"), [(40, 22), (1, 1), (23, 21)]),
        (KernelShape(2, 4, 64, 16, HALF, "int8"), [(100, 33), (17, 1), (16, 16)]),
        (KernelShape(2, 3, 80, 4, FLOAT, "int8"), [(40, 22), (1, 1), (23, 21)]),
    ],
)
def test_prefill_matches_plain_attention(shape: KernelShape, lengths: list[tuple[int, int]], device: str) -> None:
    for seed in range(2):  # one for each number of rows
        check_prefill(shape, lengths, device, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_prefill_matches_plain_attention_for_random_shapes(seed: int, device: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = random_shape(generator, DTYPES[seed % 3])
    queries = [pick(generator, 1, 2, 3, 16, 17, 40, 64, 65) for _ in range(3)]
    lengths = [(query_len + pick(generator, 0, 0, 1, 15, 16, 100), query_len) for query_len in queries]
    if any(query_len > 1 for query_len in queries):
        check_prefill(shape, lengths, device, seed)


@pytest.mark.parametrize("step", [1, 9, 16, 64, 128])
def test_query_tiles_cover_each_query_once_and_those_with_the_most_keys_come_first(step: int) -> None:
    starts, context_lens, seqs = [0, 130, 131, 140, 333], [130, 7, 500, 200], [0, 2, 3]
    tiles = query_tiles(starts, context_lens, seqs, step)
    rows = [(seq, i) for seq, row in tiles for i in range(row, min(row + step, starts[seq + 1]))]
    assert sorted(rows) == [(seq, i) for seq in seqs for i in range(starts[seq], starts[seq + 1])]
    num_keys = [context_lens[seq] - starts[seq + 1] + row + 1 for seq, row in tiles]  # of each tile's first query
    assert num_keys == sorted(num_keys, reverse=True) and tiles[0][0] == 2


# Paces


@pytest.mark.parametrize("pace", [pytest.param(pace, marks=pytest.mark.full) for pace in paces(64, 2)])
def test_a_pace_does_not_change_attention(pace: Pace, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.backends.gpu.attention_kernels.paces", lambda width, itemsize: [pace])
    check_decode(KernelShape(2, 4, 64, 16, BRAIN), 3, [300, 1, 0, 129], device)


def test_a_launch_takes_the_first_pace_that_fits_and_remembers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs triton: make test-triton")
    from ...backends.gpu import attention_kernels
    from ...backends.gpu.attention_kernels import OutOfResources

    monkeypatch.setattr(attention_kernels, "FITTING", {})
    tried = list[int]()

    class Kernel:
        """A kernel for a GPU with room for tiles of up to `room` keys."""

        room = 32

        def __getitem__(self, grid: object) -> object:
            return self.launch

        def launch(self, *arguments: object, TILE: int, **constants: object) -> None:
            tried.append(TILE)
            if self.room < TILE:
                raise OutOfResources(TILE, self.room, "shared memory")

    kernel, q = Kernel(), torch.empty(1)
    for _ in range(2):
        attention_kernels.launch(kernel, (1,), paces(16, 2), q, GROUP=2)
    assert tried == [128, 64, 32, 32]
    attention_kernels.launch(kernel, (1,), paces(16, 2), q, GROUP=4)
    assert tried[4:] == [128, 64, 32], "other constants need other memory"
    kernel.room = 8
    with pytest.raises(OutOfResources, match="Required: 16, Hardware limit: 8"):
        attention_kernels.launch(kernel, (1,), paces(16, 2), q, GROUP=8)
