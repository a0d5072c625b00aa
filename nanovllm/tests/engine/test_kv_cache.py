"""KVCache: where keys and values are written, and what is read from a block."""

import pytest
import torch

from ...checkpoints.sizes import kv_bytes_per_token
from ...engine.kv_cache import BlockCopy, KVCache
from ..testing.pools import BLOCK_SIZE, HEAD_DIM, make_cache, model_config, random_qkv, slot
from ..testing.watch import Watch


def test_slot_holds_a_key_and_a_value_for_each_kv_head_of_each_layer():
    cache = make_cache(5, num_layers=3)
    num_bytes = cache.blocks.numel() * cache.blocks.itemsize
    assert kv_bytes_per_token(model_config(num_layers=3), 4) == 2 * 3 * 2 * 8 * 4 == num_bytes // (5 * 4)
    assert kv_bytes_per_token(model_config(num_layers=3), 2) == 2 * 3 * 2 * 8 * 2


def test_block_is_contiguous_in_memory():
    cache = make_cache(5, num_layers=3)
    assert cache.blocks.shape == (5, 3, 2, 4, 2, HEAD_DIM) and cache.blocks[3].is_contiguous()


def test_only_the_given_blocks_are_cleared_in_all_layers():
    cache = make_cache(5, num_layers=3)
    cache.clear(torch.tensor([3, 1]))
    assert (cache.blocks[[1, 3]] == 0).all() and cache.blocks[[0, 2, 4]].isnan().all()
    cache.clear(torch.tensor([], dtype=torch.int64))
    assert cache.blocks[[0, 2, 4]].isnan().all()


def test_written_tokens_are_read_in_the_order_of_the_table():
    """10 tokens in blocks 5, 0 and 3, in both layers. The remaining slots and other blocks do not change."""
    table = [5, 0, 3]
    cache = make_cache(6, table, num_layers=2)
    rows = cache.rows(torch.tensor([slot(table, position) for position in range(10)]))
    written = [random_qkv(10, seed=layer)[1:] for layer in (0, 1)]
    for layer, (k, v) in enumerate(written):
        cache.write(layer, rows, k, v)
    pieces = cache.pieces(torch.tensor(table))
    for layer, (k, v) in enumerate(written):
        for length in (1, 4, 5, 10):
            keys, values = cache.read(layer, pieces, length)
            assert torch.equal(keys, k[:length]) and torch.equal(values, v[:length])
    assert (cache.blocks[3, :, :, 2:] == 1e30).all()
    assert cache.blocks[[1, 2, 4]].isnan().all()


def test_tokens_can_be_written_in_any_order_to_many_blocks_at_once():
    cache = make_cache(4)
    _, k, v = random_qkv(4)
    cache.write(0, cache.rows(torch.tensor([13, 2, 7, 12])), k, v)  # block 3 offset 1, 0 and 2, 1 and 3, 3 and 0
    assert torch.equal(cache.blocks[[3, 0, 1, 3], 0, 0, [1, 2, 3, 0]], k)
    assert torch.equal(cache.blocks[[3, 0, 1, 3], 0, 1, [1, 2, 3, 0]], v)


def test_several_sequences_are_read_together_as_each_one_alone():
    """3 sequences of 2 blocks, one of them shared, and 7 of their 8 slots."""
    tables = torch.tensor([[2, 0], [1, 4], [2, 3]])
    cache = make_cache(5, num_layers=2)
    cache.blocks.copy_(torch.randn(cache.blocks.shape, generator=torch.Generator().manual_seed(0)))
    together = cache.read(1, cache.pieces(tables), 7)
    for seq, table in enumerate(tables):
        alone = cache.read(1, cache.pieces(table), 7)
        assert all(torch.equal(x[seq], y) for x, y in zip(together, alone, strict=True))
        assert torch.equal(alone[0], cache.blocks[table, 1, 0].flatten(0, 1)[:7])


def test_pool_that_does_not_fit_is_refused_with_blocks_and_bytes():
    with pytest.raises(ValueError, match=r"cpu has no room for a pool of 1,000,000,000,000,000 blocks, 512,0"):
        KVCache(model_config(), 10**15, BLOCK_SIZE, torch.float32, torch.device("cpu"))


# int8


def int8_cache(block_size: int, dtype: torch.dtype = torch.float32) -> KVCache:
    """Return a pool of 5 blocks in which unwritten scales are NaN."""
    cache = KVCache(model_config(num_layers=2, head_dim=48), 5, block_size, dtype, torch.device("cpu"), "int8")
    cache.blocks.fill_(255)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [4, 16])
def test_keys_and_values_in_int8_are_read_as_write_returns_them(block_size, dtype):
    cache, num_tokens = int8_cache(block_size, dtype), 2 * block_size + 3
    table = [4, 0, 3]
    rows = cache.rows(torch.tensor([slot(table, position, block_size) for position in range(num_tokens)]))
    _, k, v = (each.to(dtype) for each in random_qkv(num_tokens, head_dim=48))
    v[2] = 0
    written = cache.write(1, rows, k, v)
    for number, stored in zip((k, v), written, strict=True):
        step = number.float().abs().amax(-1, keepdim=True) / 127
        assert ((number.float() - stored.float()).abs() <= step * (0.51 if dtype == torch.float32 else 1)).all()
    for result, stored in zip(cache.read(1, cache.pieces(torch.tensor(table)), num_tokens), written, strict=True):
        assert torch.equal(result, stored) and result.dtype == dtype
    unwritten = cache.read(1, cache.pieces(torch.tensor([1, 2])), 2 * block_size)
    assert all(each.isnan().all() for each in unwritten), "another block was written"
    assert all(each.isnan().all() for each in cache.read(0, cache.pieces(torch.tensor(table)), num_tokens))


def test_int8_has_254_steps_between_the_two_largest_numbers():
    cache = int8_cache(4)
    rows = cache.rows(torch.arange(4))
    k, v = (torch.randint(-127, 128, (4, model_config().num_key_value_heads, 48)).float() for _ in range(2))
    k[..., 7] = v[..., 9] = 127.0
    assert all(map(torch.equal, cache.write(1, rows, k, v), (k, v)))


def test_int8_needs_little_more_than_a_byte_per_number():
    cache = int8_cache(4)
    assert cache.bytes_per_token == kv_bytes_per_token(model_config(num_layers=2, head_dim=48), 4, "int8")
    assert cache.bytes_per_token == 2 * 2 * 2 * (48 + 4) and cache.blocks[0].is_contiguous()
    with pytest.raises(ValueError, match="a multiple of 16, got 5 and 8"):
        KVCache(model_config(), 4, 5, torch.float32, torch.device("cpu"), "int8")


# fp8


def fp8_cache(dtype: torch.dtype = torch.float32) -> KVCache:
    """Return a pool of 5 blocks in which unwritten numbers are NaN."""
    cache = KVCache(model_config(num_layers=2), 5, BLOCK_SIZE, dtype, torch.device("cpu"), "fp8")
    cache.blocks.fill_(255)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_and_values_in_fp8_are_read_as_write_returns_them(dtype):
    cache, table = fp8_cache(dtype), [4, 0, 3]
    rows = cache.rows(torch.tensor([slot(table, position) for position in range(11)]))
    _, k, v = (each.to(dtype) for each in random_qkv(11))
    k[0, 0, 0], v[1, 0, 0], v[2] = 1e4, -1e4, 0
    written = cache.write(1, rows, k, v)
    assert written[0][0, 0, 0] == 448 and written[1][1, 0, 0] == -448
    for number, stored in zip((k, v), written, strict=True):
        number = number.float().clamp(-448, 448)
        assert ((number - stored.float()).abs() <= number.abs() / 16 + 2**-10).all()  # 3 bits, and subnormal numbers
    for result, stored in zip(cache.read(1, cache.pieces(torch.tensor(table)), 11), written, strict=True):
        assert torch.equal(result, stored) and result.dtype == dtype
    assert all(each.isnan().all() for each in cache.read(1, cache.pieces(torch.tensor([1, 2])), 8))


@pytest.mark.parametrize("make", [lambda: int8_cache(BLOCK_SIZE), fp8_cache], ids=["int8", "fp8"])
def test_blocks_in_8_bits_are_copied_and_cleared_as_bytes(make):
    cache = make()
    rows, pieces = cache.rows(torch.arange(8)), cache.pieces(torch.tensor([[0, 1], [3, 2]]))
    _, k, v = random_qkv(8, head_dim=cache.head_dim)
    cache.write(0, rows, k, v)
    cache.copy_blocks([BlockCopy(0, 3), BlockCopy(1, 2)])
    assert all(torch.equal(*each) for each in cache.read(0, pieces, 8))
    cache.clear(torch.tensor([3, 2]))
    assert all((each[1] == 0).all() and (each[0] != 0).any() for each in cache.read(0, pieces, 8))


def test_fp8_needs_a_byte_per_number():
    assert (
        fp8_cache().bytes_per_token == kv_bytes_per_token(model_config(num_layers=2), 4, "fp8") == 2 * 2 * 2 * HEAD_DIM
    )


# Copies


def numbered(num_blocks: int) -> KVCache:
    """Fill every slot of block i, in all layers, with i."""
    cache = make_cache(num_blocks, num_layers=3)
    for i in range(num_blocks):
        cache.blocks[i] = i
    return cache


def contents(cache: KVCache) -> list[int]:
    """Return the contents of each block, which must be uniform."""
    blocks = cache.blocks.flatten(1)
    assert (blocks == blocks[:, :1]).all(), "a block was copied in part"
    return [int(number) for number in blocks[:, 0]]


@pytest.mark.parametrize(
    "copies, after",
    [
        ([(1, 4)], [0, 1, 2, 3, 1]),
        ([(3, 0), (1, 4)], [3, 1, 2, 3, 1]),
        ([(2, 0), (2, 1), (2, 4)], [2, 2, 2, 3, 2]),
        ([(0, 1), (1, 2)], [0, 0, 1, 3, 4]),  # 0 -> 1 -> 2: block 1 is a source before it is a target
        ([(1, 2), (0, 1)], [0, 0, 1, 3, 4]),
        ([(2, 0), (0, 1), (1, 2)], [2, 0, 1, 3, 4]),  # in a ring
        ([(4, 3), (3, 4)], [0, 1, 2, 4, 3]),
        ([], [0, 1, 2, 3, 4]),
    ],
    ids=str,
)
def test_all_copies_of_a_step_read_their_sources_first(copies, after):
    cache = numbered(5)
    cache.copy_blocks([BlockCopy(source, target) for source, target in copies])
    assert contents(cache) == after
    assert cache.num_blocks_copied == len(copies)


def test_copy_covers_all_layers_keys_values_and_slots():
    cache = numbered(3)
    cache.blocks[1] = torch.randn(cache.blocks[1].shape, generator=torch.Generator().manual_seed(0))
    source = cache.blocks[1].clone()
    cache.copy_blocks([BlockCopy(source=1, target=2)])
    assert torch.equal(cache.blocks[2], source) and torch.equal(cache.blocks[1], source)
    assert (cache.blocks[0] == 0).all()


def test_number_of_operations_does_not_depend_on_the_number_of_copies():
    counted = []
    for num_copies in (1, 20):
        cache = make_cache(2 * num_copies, num_layers=3)
        with Watch() as seen:
            cache.copy_blocks([BlockCopy(2 * i, 2 * i + 1) for i in range(num_copies)])
        counted.append(seen.num_operations)
    assert counted[1] <= counted[0], "20 copies take more operations than one"


def test_copied_blocks_are_counted_since_the_start():
    cache = numbered(5)
    for copies in ([BlockCopy(1, 4)], [], [BlockCopy(3, 0), BlockCopy(1, 4)]):
        cache.copy_blocks(copies)
    assert cache.num_blocks_copied == 3
