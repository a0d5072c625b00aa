"""Attention of a step: each token sees its own past and nothing else, tile by tile.

Unless a test changes this, the pool holds NaN in all blocks that no table of the step contains, and 1e30 in the
unwritten slots of the others. Reading any of them would show in the result.
"""

import random
from collections.abc import Callable, Iterator
from itertools import permutations

import pytest
import torch

from ...backends.torch import attention as attention_module
from ...backends.torch.attention import PagedAttention
from ...backends.torch.online_softmax import attend_part_reference
from ...llm import LLM
from ...requests.sampling_params import SamplingParams
from ..testing.pools import BLOCK_SIZE, HEAD_DIM, HEADS, Batch, make_cache, random_qkv, step
from ..testing.reference import attend_block_by_block, attend_without_cache, greedy_without_cache
from ..testing.watch import Watch

TILE_BLOCKS = {"a block": 1, "two blocks": 2, "nine blocks": 9, "more than all contexts": 1000}
each_tile = pytest.mark.parametrize(
    "tile_blocks", TILE_BLOCKS.values(), ids=[f"a tile of {name}" for name in TILE_BLOCKS]
)
each_heads = pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
each_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
SIZES = [(1, 1), (3, 2), (4, 9), (16, 1000), (16, 1), (4, 2), (3, 1000), (1, 9)]
each_size = pytest.mark.parametrize(("block_size", "tile_blocks"), SIZES)
each_size_both_ways = pytest.mark.parametrize(  # plain operations see half of the sizes
    ("block_size", "tile_blocks", "way"),
    [*((*size, "kernel") for size in SIZES), *((*size, "plain") for size in SIZES[::2])],
    indirect=["way"],
)
both_ways = pytest.mark.parametrize("way", ["kernel", "plain"], indirect=True)


def on_a_gpu(test: Callable) -> Callable:
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


@pytest.fixture
def way(request, monkeypatch):
    """Attend by PyTorch's CPU kernel, or by plain operations as on other devices."""
    if request.param == "plain":
        monkeypatch.setattr(attention_module, "attend_part", attend_part_reference)


def assert_attends(batch: Batch, tile_blocks: int, device: str = "cpu") -> None:
    out = batch.attend(tile_blocks * batch.block_size, device=device)
    torch.testing.assert_close(out, batch.expected(), msg=lambda text: f"{batch}: {text}")


# One sequence


@each_size_both_ways
def test_chunk_tokens_see_the_past_and_themselves(way, block_size, tile_blocks):
    """Chunks start and end at, before and after block boundaries, and are shorter or longer than a block."""
    for before in (0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size, 5 * block_size - 1):
        ends = {2 * block_size - 1, 2 * block_size, 2 * block_size + 1, 4 * block_size, before + 2, before + 3}
        for end in sorted(end for end in ends if end >= before + 2):
            assert_attends(Batch([(before, end - before)], block_size), tile_blocks)


@each_heads
@each_tile
def test_chunks_work_with_shared_kv_heads(heads, tile_blocks):
    for before, now in ((4, 4), (9, 3), (0, 6), (7, 2)):
        assert_attends(Batch([(before, now)], heads=heads), tile_blocks)


@pytest.mark.parametrize("head_dim", [1, 6, 20, 64])
@both_ways
def test_head_dim_may_be_any_number(way, head_dim):
    assert_attends(Batch([(5, 1), (9, 1), (0, 6), (6, 5)], head_dim=head_dim), tile_blocks=2)


@pytest.mark.parametrize("lengths", [[1] * 11, [11], [4, 4, 3], [1, 2, 3, 5], [3, 1, 1, 6], [8, 2, 1]], ids=str)
def test_chunks_of_any_lengths_give_the_same_result(lengths):
    table = [3, 0, 5]
    q, k, v = random_qkv(11)
    attention = PagedAttention(make_cache(6, table), tile_size=4)
    rows, start = [], 0
    for length in lengths:
        attend = attention.plan(step([(table, start, length)]))
        rows.append(attend(0, *(x[start : start + length] for x in (q, k, v))))
        start += length
    torch.testing.assert_close(torch.cat(rows), attend_without_cache(0, q, k, v))


def test_blocks_may_be_anywhere_in_the_pool():
    q, k, v = random_qkv(10)
    for table in permutations(range(4), 3):
        attention = PagedAttention(make_cache(4, list(table)), tile_size=BLOCK_SIZE)
        rows = []
        for before, now in ((0, 6), (6, 3), (9, 1)):
            attend = attention.plan(step([(list(table), before, now)]))
            rows.append(attend(0, *(x[before : before + now] for x in (q, k, v))))
        torch.testing.assert_close(torch.cat(rows), attend_without_cache(0, q, k, v))


@each_size
def test_a_decode_gives_the_same_as_the_loop_over_blocks(block_size, tile_blocks):
    """attend_block_by_block() is FlashAttention's loop on the same pool."""
    heads, table = (6, 2), [7, 2, 5, 0, 3]
    for context_len in {1, block_size, 2 * block_size + 1, 5 * block_size - 1, 5 * block_size}:
        needed = table[: -(-context_len // block_size)]
        cache = make_cache(8, needed, block_size=block_size)
        q, k, v = random_qkv(context_len, *heads)
        attention = PagedAttention(cache, tile_blocks * block_size)
        attend = attention.plan(step([(needed, 0, context_len)], block_size))
        attend(0, q, k, v)
        attend = attention.plan(step([(needed, context_len - 1, 1)], block_size))
        out = attend(0, q[-1:], k[-1:], v[-1:])
        torch.testing.assert_close(out[0], attend_block_by_block(q[-1], cache, 0, needed, context_len))


# A batch


MIXTURE = {
    "a prompt": (0, 5),
    "a chunk": (6, 3),
    "a decode": (9, 1),
    "a decode that starts a block": (4, 1),
    "a prompt of one token": (0, 1),
}


def mixtures(block_size: int, num: int) -> Iterator[Batch]:
    """Yield batches of prompts, chunks and decodes, with contexts from 1 token to 5 blocks."""
    rng = random.Random(block_size)
    for seed in range(num):
        befores = [rng.choice([0, rng.randrange(1, 4 * block_size + 1)]) for _ in range(rng.randint(1, 6))]
        sizes = [(before, rng.choice([1, 1, rng.randint(2, block_size + 2)])) for before in befores]
        yield Batch(sizes, block_size, rng.choice([*HEADS.values()]), seed=seed)


@each_size_both_ways
def test_prompts_chunks_and_decodes_may_be_mixed(way, block_size, tile_blocks):
    for batch in mixtures(block_size, num=12):
        assert_attends(batch, tile_blocks)


def test_sequences_in_one_step_do_not_see_each_other():
    """A prompt of 4 tokens, a decode after 5, and a prompt of 1, with their blocks in a different order in the pool."""
    attention = PagedAttention(make_cache(6, [2], [5, 1], [0]), tile_size=4)
    a, b, c = (random_qkv(n, seed=n) for n in (4, 6, 1))
    attend = attention.plan(step([([5, 1], 0, 5)]))
    attend(0, *(x[:5] for x in b))
    attend = attention.plan(step([([2], 0, 4), ([5, 1], 5, 1), ([0], 0, 1)]))
    out = attend(0, *(torch.cat((x, y[5:], z)) for x, y, z in zip(a, b, c, strict=True)))
    alone = torch.cat((attend_without_cache(0, *a), attend_without_cache(0, *b)[5:], attend_without_cache(0, *c)))
    torch.testing.assert_close(out, alone)


def test_layers_do_not_see_each_other():
    """A prompt, a chunk and a decode in both layers."""
    attention = PagedAttention(make_cache(4, [2, 0, 3], num_layers=2), tile_size=4)
    layers = [random_qkv(11, seed=1), random_qkv(11, seed=2)]
    for before, end in ((0, 5), (5, 10), (10, 11)):
        attend = attention.plan(step([([2, 0, 3], before, end - before)]))
        for layer, qkv in enumerate(layers):
            out = attend(layer, *(x[before:end] for x in qkv))
            torch.testing.assert_close(out, attend_without_cache(layer, *qkv)[before:end])


def test_a_step_writes_its_slots_and_clears_the_rest_of_new_blocks():
    """5 tokens fill block 2 and the first slot of block 0, one more is in block 3, and block 1 is unused."""
    cache = make_cache(4, num_layers=2)
    attention = PagedAttention(cache, tile_size=4)
    q, k, v = random_qkv(6)
    attend = attention.plan(step([([2, 0], 0, 5), ([3], 0, 1)]))
    attend(1, q, k, v)
    blocks, offsets = [2, 2, 2, 2, 0, 3], [0, 1, 2, 3, 0, 0]
    assert torch.equal(cache.blocks[blocks, 1, 0, offsets], k) and torch.equal(cache.blocks[blocks, 1, 1, offsets], v)
    cache.blocks[blocks, 1, :, offsets] = 0
    assert (cache.blocks[[0, 2, 3]] == 0).all() and cache.blocks[1].isnan().all(), "something else was written"


def test_a_block_that_was_started_earlier_is_not_cleared():
    cache = make_cache(2, [1])
    attention = PagedAttention(cache, tile_size=4)
    attention.plan(step([([1], 2, 1)]))
    assert (cache.blocks[1] == 1e30).all() and cache.blocks[0].isnan().all()


def test_nan_left_by_an_earlier_sequence_is_not_seen():
    """Two sequences share a tile, masked past their ends. Masked slots have weight 0, but 0 x NaN is NaN."""
    attention = PagedAttention(make_cache(5), tile_size=32)
    a, b = random_qkv(6, seed=1), random_qkv(12, seed=2)
    expected_a, expected_b = (attend_without_cache(0, *qkv) for qkv in (a, b))
    for of_a, of_b in ((slice(0, 5), slice(0, 11)), (slice(5, 6), slice(11, 12))):
        members = [([2, 0], of_a.start, of_a.stop - of_a.start), ([4, 1, 3], of_b.start, of_b.stop - of_b.start)]
        attend = attention.plan(step(members))
        out = attend(0, *(torch.cat((x[of_a], y[of_b])) for x, y in zip(a, b, strict=True)))
        torch.testing.assert_close(out, torch.cat((expected_a[of_a], expected_b[of_b])))


def test_q_k_and_v_are_not_changed():
    qkv = random_qkv(7)
    given = [x.clone() for x in qkv]
    attention = PagedAttention(make_cache(3, [2, 0], [1]), tile_size=4)
    attend = attention.plan(step([([2, 0], 0, 6), ([1], 0, 1)]))
    attend(0, *qkv)
    assert all(torch.equal(a, b) for a, b in zip(qkv, given, strict=True))


def test_attend_rejects_a_batch_of_another_size():
    attend = PagedAttention(make_cache(2), tile_size=4).plan(step([([0], 0, 3)]))
    with pytest.raises(AssertionError, match="the step has 3 queries, got 2"):
        attend(0, *random_qkv(2))


@each_half
@both_ways
def test_half_precision_is_as_exact_as_its_dtype(way, dtype):
    assert_loses_little(dtype)


def assert_loses_little(dtype: torch.dtype, device: str = "cpu") -> None:
    for sizes in ([(79, 1), (3, 1), (50, 1)], [(0, 40)], [(70, 10)]):
        batch = Batch(sizes)
        error = (batch.attend(8, dtype, device) - batch.expected()).abs().max()
        assert error <= 8 * torch.finfo(dtype).eps, f"{sizes}: {error:.1e}"


@each_half
def test_sums_over_many_tiles_are_rounded_only_once(dtype):
    assert_rounded_once(dtype)


def assert_rounded_once(dtype: torch.dtype, device: str = "cpu") -> None:
    """Use scores of 0 and small integers as values, so that only the mean over all tiles is rounded."""
    values = torch.randint(4, (11, 2, HEAD_DIM), generator=torch.Generator().manual_seed(0)).repeat_interleave(8, dim=0)
    means = values.cumsum(0).double() / torch.arange(1, 89).view(-1, 1, 1)  # [88, num_kv_heads, head_dim]
    expected = means.repeat_interleave(2, dim=1).to(dtype)  # [88, num_heads, head_dim]
    q, k, v = (x.to(device, dtype) for x in (torch.zeros(88, 4, HEAD_DIM), torch.zeros_like(values), values))
    table = list(range(22))
    attention = PagedAttention(make_cache(22, table, dtype=dtype, device=device), tile_size=8)
    outs = []
    for before, end in ((0, 80), (80, 88), (87, 88)):  # a prompt; a chunk after 10 tiles; a decode over 11 tiles
        attend = attention.plan(step([(table, before, end - before)], device=device))
        outs.append(attend(0, *(x[before:end] for x in (q, k, v))).cpu())
    assert torch.equal(outs[1], expected[80:])
    assert torch.equal(outs[2], expected[87:])


@on_a_gpu
@each_size
def test_prompts_chunks_and_decodes_may_be_mixed_on_a_gpu(block_size, tile_blocks):
    for batch in mixtures(block_size, num=25):
        assert_attends(batch, tile_blocks, device="cuda")


@on_a_gpu
@each_half
def test_half_precision_is_as_exact_as_its_dtype_on_a_gpu(dtype):
    assert_loses_little(dtype, device="cuda")
    assert_rounded_once(dtype, device="cuda")


# Tiles


def reads(cache, monkeypatch) -> list[tuple[int, int]]:
    """Record (blocks, slots) of each later read, counted over its sequences."""
    read, seen = cache.read, []

    def watched(layer, pieces, length):
        seen.append((pieces.numel() // 2, pieces[..., 0].numel() * length))
        return read(layer, pieces, length)

    monkeypatch.setattr(cache, "read", watched)
    return seen


@pytest.mark.parametrize("spare", [[], [9, 10, 11]])
def test_a_tile_reads_only_sequences_that_reach_it(monkeypatch, spare):
    """Contexts of 3, 18 and 11 slots in tiles of 16, as in the picture in attention.py. Spare blocks are not read."""
    tables = [[0], [1, 2, 3, 4, 5, *spare], [6, 7, 8]]
    cache = make_cache(12, *tables)
    attention = PagedAttention(cache, tile_size=16)
    seen = reads(cache, monkeypatch)
    attend = attention.plan(step([(table, n - 1, 1) for table, n in zip(tables, (3, 18, 11), strict=True)]))
    attend(0, *random_qkv(3))
    assert seen == [(3, 12), (4, 16), (2, 8)]


@pytest.mark.parametrize("spare", [0, 5])
def test_a_chunk_reads_earlier_keys_but_not_its_own(monkeypatch, spare):
    """18 slots in tiles of 8. Spare blocks belong to the rest of the prompt."""
    table = list(range(6 + spare))
    cache = make_cache(6 + spare, table)
    attention = PagedAttention(cache, tile_size=8)
    seen = reads(cache, monkeypatch)
    attend = attention.plan(step([(table, 18, 4)]))
    attend(0, *random_qkv(4))
    assert [min(blocks * BLOCK_SIZE, slots) for blocks, slots in seen] == [8, 8, 2]
    assert all(blocks <= 2 for blocks, _ in seen)


@pytest.mark.parametrize("tile_size, blocks", [(1, 1), (3, 1), (4, 1), (7, 1), (8, 2), (11, 2), (12, 3), (1000, 5)])
def test_a_tile_has_whole_blocks_and_at_least_one(monkeypatch, tile_size, blocks):
    """A decode and a chunk each read 5 blocks of 4 slots."""
    for table, before, now in (([4, 2, 0, 1, 3], 19, 1), ([4, 2, 0, 1, 3, 5], 20, 2)):
        cache = make_cache(6, table)
        attention = PagedAttention(cache, tile_size)
        seen = reads(cache, monkeypatch)
        attend = attention.plan(step([(table, before, now)]))
        attend(0, *random_qkv(now))
        assert min(seen[0][0], 5) == blocks and len(seen) == -(-5 // blocks)


def test_a_prompt_does_not_read_the_pool(monkeypatch):
    cache = make_cache(4, [0, 1], [2, 3])
    attention = PagedAttention(cache, tile_size=4)
    seen = reads(cache, monkeypatch)
    attend = attention.plan(step([([0, 1], 0, 6), ([2, 3], 0, 5)]))
    attend(0, *random_qkv(11))
    assert seen == []


# The cost of a step


def watch(
    sizes: list[tuple[int, int]], tile_size: int = 64, heads: tuple[int, int] = (8, 2), head_dim: int = 64
) -> Watch:
    """Watch a step of one layer, with blocks of 16 slots and a pool of zeros."""
    counts = [-(-(before + now) // 16) for before, now in sizes]
    blocks = iter(torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist())
    tables = [[next(blocks) for _ in range(count)] for count in counts]
    cache = make_cache(sum(counts), block_size=16, num_kv_heads=heads[1], head_dim=head_dim)
    cache.blocks.zero_()
    attention = PagedAttention(cache, tile_size)
    qkv = random_qkv(sum(now for _, now in sizes), *heads, head_dim=head_dim)
    members = step([(table, *size) for table, size in zip(tables, sizes, strict=True)], block_size=16)
    with Watch() as seen:
        attend = attention.plan(members)
        attend(0, *qkv)
    return seen


def tile_bytes(tile_size: int = 64, num_kv_heads: int = 2, head_dim: int = 64) -> int:
    """Return the bytes of float32 keys and values of `tile_size` slots."""
    return 2 * tile_size * num_kv_heads * head_dim * 4


@both_ways
def test_the_number_of_operations_does_not_depend_on_the_number_of_sequences(way):
    """The number of tiles is the same: each has 4 blocks of every sequence, or more if short contexts have ended."""
    for context_len in (1, 64, 500):
        few, many = (watch([(context_len - 1, 1)] * n, tile_size=n * 64) for n in (2, 20))
        assert few.num_operations == many.num_operations > 0
    mixed = [(length, 1) for length in (499, 3, 200, 77, 64)]
    assert watch(mixed * 2, tile_size=640).num_operations == watch(mixed * 8, tile_size=2560).num_operations


def test_the_number_of_operations_is_linear_in_the_number_of_tiles():
    few, more, most = (watch([(n * 16 - 1, 1)] * 3).num_operations for n in (2, 4, 8))
    assert most - more == 2 * (more - few) > 0


@pytest.mark.parametrize("num_seqs", [1, 4])
@both_ways
def test_the_largest_temporary_of_decodes_is_one_tile(way, num_seqs):
    """It depends neither on the length nor on the number of contexts."""
    largest = [watch([(context_len - 1, 1)] * num_seqs).largest for context_len in (64, 128, 320)]
    assert largest == [tile_bytes()] * 3


def test_the_largest_temporary_of_a_chunk_is_one_tile():
    largest = [watch([(before, 8)]).largest for before in (64, 256, 1024)]
    assert largest == [tile_bytes()] * 3, "twice as much means that a KV head was copied for each query head"


@pytest.mark.parametrize("now", [1, 8])
def test_only_a_few_tiles_exist_at_a_time(now):
    """One tile is read while the previous one is still held, next to queries and outputs or a mask."""
    for context_len in (256, 1024):
        peak = watch([(context_len - now, now)] * 2).peak
        assert peak <= 3 * tile_bytes(), "tiles are kept after use, or KV heads are copied for each query head"


@pytest.mark.parametrize("sizes", [[(199, 1), (150, 1)], [(200, 8)]], ids=["decode", "a chunk"])
def test_shared_keys_and_values_are_not_repeated(sizes):
    for num_kv_heads in (1, 2):
        groups = [watch(sizes, heads=(group * num_kv_heads, num_kv_heads)).largest for group in (1, 4, 8)]
        assert groups == [tile_bytes(num_kv_heads=num_kv_heads)] * 3


# In the engine


@pytest.mark.parametrize("tile_size, slots", [(1, 4), (8, 8), (1000, 24)])
def test_the_engine_uses_its_tile_size(checkpoint, monkeypatch, tile_size, slots):
    """A context of 21 tokens has 6 blocks of 4."""
    llm = LLM(checkpoint, block_size=4, tile_size=tile_size, kv_cache_tokens=64)
    seen = reads(llm.llm_engine.kv_cache, monkeypatch)
    llm.generate([[1] * 20], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    assert max(length for _, length in seen) == slots


@pytest.mark.parametrize(("tile_size", "block_size"), [(1, 5), (4, 1), (8, 4), (8, 5), (1000, 4)])
def test_tile_size_and_block_size_do_not_change_tokens(checkpoint, model, tile_size, block_size):
    prompts = [[1, 5, 9], [1], list(range(3, 15)), [1, 44]]
    llm = LLM(checkpoint, block_size=block_size, tile_size=tile_size, kv_cache_tokens=200)
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == greedy_without_cache(model, prompt, 12)
