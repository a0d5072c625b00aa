"""HostTier: its pool, its copies, and the arrival of loads."""

import pytest
import torch

from ...engine.kv_cache import BlockCopy, KVCache
from ...engine.observer import Observer
from ...engine.prefix_cache import BlockHash
from ...tiers.host_tier import HostTier
from ..testing.pools import make_cache, model_config

gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SHAPE = (3, 2, 4, 2, 8)  # of a block: num_layers, 2, block_size, num_kv_heads, head_dim


def filled(num_blocks: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> KVCache:
    """Return a pool in which no two numbers are equal."""
    cache = make_cache(num_blocks, num_layers=3, dtype=dtype, device=device)
    numbers = torch.randn(cache.blocks.shape, generator=torch.Generator().manual_seed(0))
    cache.blocks.copy_(numbers)
    return cache


def tier_of(cache: KVCache, num_blocks: int) -> HostTier:
    return HostTier(cache.blocks, num_blocks, Observer())


def name(block: int) -> BlockHash:
    return f"block {block}".encode()


def store_all(tier: HostTier, num_blocks: int) -> None:
    """Store these blocks of the device again, in order."""
    tier.reset()
    for block in range(num_blocks):
        tier.store(block, name(block))


def load(tier: HostTier, held: list[int], targets: list[int]) -> None:
    tier.load([BlockCopy(*pair) for pair in zip(held, targets, strict=True)])


def wait(tier: HostTier) -> list[int]:
    blocks, _ = tier.collect(wait=True)
    tier.check_integrity()
    return blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tier_has_blocks_of_the_devices_shape(dtype):
    tier = tier_of(filled(5, dtype), 7)
    assert tier.blocks.shape == (7, *SHAPE) and tier.blocks.dtype == dtype
    assert tier.blocks.device.type == "cpu" and tier.num_blocks == 7
    assert (tier.num_blocks_stored, tier.num_blocks_loaded, tier.num_useful_stores) == (0, 0, 0)


def test_empty_tier_stores_nothing():
    tier = tier_of(filled(5), 0)
    assert tier.blocks.shape == (0, *SHAPE)
    tier.store(0, name(0))
    assert name(0) not in tier and tier.num_blocks_stored == 0 and tier.has_arrived([0])
    assert wait(tier) == [] and tier.arriving() == []


def test_host_without_room_is_one_error_with_blocks_and_bytes():
    """A block has 3 layers x 2 x 4 slots x 2 heads x 8 numbers of 4 bytes."""
    error = "^host memory has no room for a pool of 1,000,000,000,000,000 blocks, 1,536,000,000,000,000,000 bytes$"
    with pytest.raises(ValueError, match=error) as raised:
        tier_of(filled(1), 10**15)
    assert raised.value.__cause__ is None and raised.value.__suppress_context__


def test_store_copies_a_block_in_every_layer_and_nothing_else():
    cache = filled(4)
    tier, device = tier_of(cache, 6), cache.blocks.clone()
    tier.blocks.zero_()
    tier.store(0, name(0))
    tier.store(3, name(3))
    assert torch.equal(tier.blocks[tier.pool.cached[name(0)]], device[0])
    assert torch.equal(tier.blocks[tier.pool.cached[name(3)]], device[3])
    assert (tier.blocks.flatten(1).any(dim=1)).sum() == 2 and torch.equal(cache.blocks, device)
    assert (tier.num_blocks_stored, tier.num_blocks_loaded) == (2, 0)
    tier.check_integrity()


def test_load_copies_blocks_in_every_layer_and_nothing_else():
    cache = filled(4)
    tier, device = tier_of(cache, 6), cache.blocks.clone()
    store_all(tier, 4)
    held = tier.hold([name(2), name(3)])
    load(tier, held, [1, 0])
    assert tier.arriving() == [1, 0]
    assert wait(tier) == [1, 0]
    assert torch.equal(cache.blocks, torch.stack([device[3], device[2], device[2], device[3]]))
    assert (tier.num_blocks_stored, tier.num_blocks_loaded) == (4, 2)


def test_full_tier_evicts_the_oldest_block_and_keeps_held_ones():
    tier = tier_of(filled(5), 2)
    tier.store(0, name(0)), tier.store(1, name(1))
    held = tier.hold([name(0)])
    tier.store(2, name(2))
    assert [name(block) in tier for block in range(3)] == [True, False, True]
    held += tier.hold([name(2)])
    tier.store(3, name(3))
    assert name(3) not in tier, "all blocks of the host are held"
    tier.release(held)
    tier.check_integrity()


def test_text_that_is_stored_again_is_renewed_without_a_copy():
    tier = tier_of(filled(5), 2)
    tier.store(0, name(0)), tier.store(1, name(1)), tier.store(4, name(0)), tier.store(2, name(2))
    assert [name(block) in tier for block in range(3)] == [True, False, True] and tier.num_blocks_stored == 3


def test_loaded_stores_are_counted_once_each():
    """0 is loaded twice, 1 once, 2 never. Then 0 is evicted, stored again, and not loaded."""
    tier = tier_of(filled(5), 3)
    store_all(tier, 3)
    for names in ([0], [0, 1]):
        load(tier, tier.hold([name(block) for block in names]), names), wait(tier)
    assert (tier.num_blocks_stored, tier.num_blocks_loaded, tier.num_useful_stores) == (3, 3, 2)
    for block in (3, 4, 2, 0):
        tier.store(block, name(block))
    assert tier.num_blocks_stored > 3 and tier.num_useful_stores == 2


def test_failed_copy_leaves_everything_unchanged():
    cache = filled(4)
    tier = tier_of(cache, 6)
    with pytest.raises(IndexError):
        tier.store(4, name(4))
    assert name(4) not in tier and len(tier.pool.free) == 6
    store_all(tier, 2)
    held = tier.hold([name(0), name(1)])
    with pytest.raises(IndexError):
        load(tier, held, [1, 4])
    assert (tier.num_blocks_stored, tier.num_blocks_loaded, tier.loads) == (2, 0, [])
    tier.release(held)
    tier.check_integrity()


class Event:
    """The methods of a CUDA event that a Load uses."""

    def __init__(self) -> None:
        self.is_past = False

    def query(self) -> bool:
        return self.is_past

    def synchronize(self) -> None:
        self.is_past = True


def slow_loads(num: int) -> tuple[HostTier, list[Event]]:
    """Return a tier that loads its block i to the device's block i, each with a pending event."""
    tier, events = tier_of(filled(4), 4), [Event() for _ in range(num)]
    store_all(tier, num)
    for block, event in enumerate(events):
        load(tier, tier.hold([name(block)]), [block])
        tier.loads[-1].event = event
    return tier, events


def test_load_without_streams_arrives_immediately():
    tier = tier_of(filled(4), 4)
    store_all(tier, 2)
    load(tier, tier.hold([name(0)]), [3])
    assert tier.has_arrived([3]) and tier.collect() == ([3], [])


def test_load_arrives_when_its_event_completes_or_after_waiting():
    tier, events = slow_loads(2)
    assert not tier.has_arrived([0, 3]) and tier.has_arrived([2, 3]) and tier.collect() == ([], [])
    events[1].is_past = True
    assert tier.has_arrived([1]) and not tier.has_arrived([0, 1])
    tier.check_integrity()
    assert tier.collect() == ([1], []) and tier.arriving() == [0]
    assert wait(tier) == [0] and tier.has_arrived([0])


# On a GPU


def busy() -> None:
    """Keep the compute stream busy for some milliseconds."""
    a = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        a = (a @ a).softmax(dim=-1)


@gpu
@needs_cuda
def test_gpu_tier_has_pinned_memory_and_a_stream_for_loads():
    tier = tier_of(filled(4, device="cuda"), 6)
    assert tier.blocks.is_pinned() and tier._stream != torch.cuda.current_stream()  # noqa: SLF001 - only a GPU could show it by time
    assert tier_of(filled(4, device="cuda"), 0).num_blocks == 0


@gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_loads_bring_the_bytes_back_during_a_matmul(dtype):
    cache = filled(64, dtype, "cuda")
    tier, device = tier_of(cache, 64), cache.blocks.clone()
    order = list(reversed(range(64)))
    busy()
    store_all(tier, 64)
    cache.blocks.fill_(float("nan"))  # launched after the stores, which do not see it
    load(tier, tier.hold([name(block) for block in order]), list(range(64)))  # launched after the NaN
    busy()
    assert wait(tier) == list(range(64)) and torch.equal(cache.blocks, device[order])


@gpu
@needs_cuda
def test_gpu_stores_run_in_the_order_of_the_steps():
    cache = filled(256, device="cuda")
    tier = tier_of(cache, 256)
    for number in range(10):
        busy()
        cache.blocks.fill_(number)
        store_all(tier, 256)
        cache.blocks.fill_(-1)
        torch.cuda.synchronize()
        assert (tier.blocks == number).all()


@gpu
@needs_cuda
def test_gpu_load_waits_for_the_store_of_its_source():
    cache = filled(512, device="cuda")
    tier = tier_of(cache, 256)
    for number in range(1, 10):
        busy()
        cache.blocks[:256].fill_(number)
        store_all(tier, 256)
        load(tier, tier.hold([name(block) for block in range(256)]), list(range(256, 512)))
        wait(tier)
        assert (cache.blocks[256:] == number).all()


@gpu
@needs_cuda
def test_gpu_steps_and_stores_do_not_wait_for_a_load():
    """A GiB is loading in blocks of 16 MiB; work that is launched later completes first."""
    cache = KVCache(model_config(8, 16, 64), 65, 256, torch.float32, torch.device("cuda"))
    cache.blocks.fill_(1)
    tier = tier_of(cache, 65)
    store_all(tier, 64)
    cache.blocks.zero_()
    load(tier, tier.hold([name(0)]), [0])
    wait(tier)
    torch.cuda.synchronize()
    load(tier, tier.hold([name(block) for block in range(1, 64)]), list(range(1, 64)))
    tier.store(64, name(64))
    _ = cache.blocks[0] * 2
    torch.cuda.current_stream().synchronize()
    assert not tier.has_arrived([63]), "it was queued before work that does not depend on it"
    wait(tier)
    assert tier.has_arrived([63]) and (cache.blocks[:64] == 1).all()
