"""HostTier: what is stored, what is evicted, and when a load has arrived. Four blocks on the device, three here."""

import pytest
import torch

from ..host_tier import HostTier, Load
from ..kv_cache import BlockCopy
from ..observer import Observer

SHAPE = (4, 2, 2, 4, 1, 8)  # num_blocks, num_layers, keys and values, block_size, num_kv_heads, head_dim


class Event:
    """The event of a load that arrives when somebody waits for it."""

    has_arrived = False

    def query(self) -> bool:
        return self.has_arrived

    def synchronize(self) -> None:
        self.has_arrived = True


@pytest.fixture
def device_blocks() -> torch.Tensor:
    return torch.randn(SHAPE)


@pytest.fixture
def tier(device_blocks) -> HostTier:
    return HostTier(device_blocks, 3, Observer())


def test_a_block_comes_back_with_its_bytes_and_other_blocks_stay_as_they_are(tier, device_blocks):
    before = device_blocks.clone()
    tier.store(2, b"a")
    device_blocks[2] = 0
    tier.load([BlockCopy(*tier.hold([b"a"]), 1)])
    assert torch.equal(device_blocks[1], before[2]) and torch.equal(device_blocks[[0, 3]], before[[0, 3]])
    assert (tier.num_blocks_stored, tier.num_blocks_loaded) == (1, 1)


def test_a_stored_text_is_in_the_tier_until_it_is_the_least_recently_used(tier):
    for block, text in enumerate([b"a", b"b", b"c", b"d"]):
        tier.store(block, text)
    assert [text in tier for text in (b"a", b"b", b"c", b"d")] == [False, True, True, True]
    tier.check_integrity()


def test_a_text_that_is_stored_again_is_not_copied_and_becomes_the_most_recently_used(tier):
    for block, text in enumerate([b"a", b"b", b"c", b"a", b"d"]):
        tier.store(block % 4, text)
    assert [text in tier for text in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    assert tier.num_blocks_stored == 4


def test_a_held_text_is_not_evicted_until_it_is_released(tier):
    tier.store(0, b"a")
    held = tier.hold([b"a"])
    for text in (b"b", b"c", b"d", b"e"):
        tier.store(1, text)
    assert b"a" in tier
    tier.release(held)
    for text in (b"f", b"g", b"h"):
        tier.store(1, text)
    assert b"a" not in tier


def test_a_tier_whose_blocks_are_all_held_stores_nothing(tier):
    for text in (b"a", b"b", b"c"):
        tier.store(0, text)
    held = tier.hold([b"a", b"b", b"c"])
    tier.store(1, b"d")
    assert b"d" not in tier and tier.num_blocks_stored == 3
    tier.release(held)
    tier.check_integrity()


def test_an_empty_tier_stores_nothing(device_blocks):
    tier = HostTier(device_blocks, 0, Observer())
    tier.store(0, b"a")
    assert b"a" not in tier and tier.num_blocks_stored == 0
    tier.check_integrity()


def test_a_load_holds_its_blocks_here_until_it_is_collected(tier):
    tier.store(0, b"a")
    tier.load([BlockCopy(*tier.hold([b"a"]), 3)])
    for text in (b"b", b"c", b"d"):
        tier.store(1, text)
    assert b"a" in tier
    tier.check_integrity()
    assert tier.collect() == [3] and tier.collect() == []
    for text in (b"e", b"f", b"g"):
        tier.store(1, text)
    assert b"a" not in tier


def test_blocks_on_their_way_are_not_collected_before_they_have_arrived_unless_somebody_waits(tier):
    for block, text in enumerate([b"a", b"b"]):
        tier.store(block, text)
    loads = [Load([BlockCopy(*tier.hold([text]), target)], Event()) for text, target in ((b"a", 2), (b"b", 3))]
    tier.loads += loads
    assert not tier.has_arrived([0, 2]) and not tier.has_arrived([3]) and tier.has_arrived([0, 1])
    assert tier.collect() == []
    loads[1].event.synchronize()
    assert tier.has_arrived([3]) and not tier.has_arrived([2, 3])
    tier.check_integrity()
    assert tier.collect() == [3]
    assert tier.collect(wait=True) == [2] and tier.has_arrived([2, 3])
    tier.check_integrity()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bytes_survive_stores_and_loads_beside_steps_on_a_gpu():
    """Each block is overwritten on the compute stream right after its store, and again before its load."""
    blocks = torch.randn(64, 8, 2, 16, 8, 128, device="cuda")
    before, tier = blocks.cpu(), HostTier(blocks, 64, Observer())
    for block in range(64):
        tier.store(block, bytes([block]))
        blocks[block] = float("nan")
    for block in range(64):
        tier.load([BlockCopy(*tier.hold([bytes([block])]), 63 - block)])
    assert sorted(tier.collect(wait=True)) == list(range(64))
    assert torch.equal(blocks.cpu().flip(0), before)
