"""HostTier: what is stored, what is evicted, and when a load has arrived. Four blocks on the device, three here."""

from contextlib import contextmanager
from unittest.mock import MagicMock

import pytest
import torch

from ..host_tier import HostTier, Load
from ..kv_cache import BlockCopy
from ..observer import Observer

SHAPE = (4, 2, 2, 4, 1, 8)  # num_blocks, num_layers, keys and values, block_size, num_kv_heads, head_dim


class Event:
    """The event of a load, which arrives when the tier waits for it."""

    has_arrived = False

    def query(self) -> bool:
        return self.has_arrived

    def synchronize(self) -> None:
        self.has_arrived = True


class Recorder(Observer):
    """An observer that keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def tell(self, kind: str, *details: object) -> None:
        self.events.append((kind, *details))


@pytest.fixture
def device_blocks() -> torch.Tensor:
    return torch.randn(SHAPE)


@pytest.fixture
def tier(device_blocks) -> HostTier:
    return HostTier(device_blocks, 3, Observer())


def stored(tier: HostTier, *hashes: bytes) -> list[bool]:
    return [block_hash in tier for block_hash in hashes]


def test_a_stored_block_keeps_its_bytes_when_the_device_block_is_reused(tier, device_blocks):
    before = device_blocks[2].clone()
    tier.store(2, b"a")
    assert stored(tier, b"a") == [True], "block 2 was stored under hash a"
    device_blocks[2] = 0
    [held] = tier.hold([b"a"])
    assert torch.equal(tier.blocks[held], before), "the host's block must be a copy of device block 2"


def test_a_full_tier_evicts_the_least_recently_used_block(tier):
    """The host has three blocks, and blocks a, b, c and d are stored in this order."""
    for block, block_hash in enumerate([b"a", b"b", b"c", b"d"]):
        tier.store(block, block_hash)
    assert stored(tier, b"a", b"b", b"c", b"d") == [False, True, True, True], "d must evict a"
    tier.check_integrity()


def test_storing_a_block_again_renews_it_without_a_copy(tier):
    """The host has three blocks, and blocks a, b, c, a and d are stored in this order."""
    for block, block_hash in enumerate([b"a", b"b", b"c", b"a", b"d"]):
        tier.store(block % 4, block_hash)
    assert stored(tier, b"a", b"b", b"c", b"d") == [True, False, True, True], "a was used after b: d must evict b"
    assert tier.num_blocks_stored == 4, "the second a needs no copy"
    tier.check_integrity()


def test_a_held_block_is_not_evicted_until_it_is_released(tier):
    tier.store(0, b"a")
    held = tier.hold([b"a"])
    for block_hash in (b"b", b"c", b"d", b"e"):
        tier.store(1, block_hash)
    assert stored(tier, b"a") == [True]
    tier.release(held)
    for block_hash in (b"f", b"g", b"h"):
        tier.store(1, block_hash)
    assert stored(tier, b"a") == [False]


def test_a_block_that_is_held_can_be_stored_again(tier):
    tier.store(0, b"a")
    held = tier.hold([b"a"])
    tier.store(1, b"a")
    assert tier.num_blocks_stored == 1, "block a is on the host already"
    tier.release(held)
    tier.check_integrity()


def test_a_tier_whose_blocks_are_all_held_stores_nothing(tier):
    for block_hash in (b"a", b"b", b"c"):
        tier.store(0, block_hash)
    held = tier.hold([b"a", b"b", b"c"])
    tier.store(1, b"d")
    assert stored(tier, b"d") == [False] and tier.num_blocks_stored == 3, "loads hold all blocks: d has no room"
    tier.release(held)
    tier.check_integrity()


def test_a_tier_without_blocks_stores_nothing(device_blocks):
    tier = HostTier(device_blocks, 0, Observer())
    tier.store(0, b"a")
    assert stored(tier, b"a") == [False] and tier.num_blocks_stored == 0, "the host has no block to store a in"
    tier.check_integrity()


def test_the_observer_hears_which_blocks_are_stored_and_renewed(device_blocks):
    recorder = Recorder()
    tier = HostTier(device_blocks, 3, recorder)
    tier.store(2, b"a")
    tier.store(1, b"a")
    expected = [("store", 2, 0, b"a"), ("renew", 0, b"a")]
    assert recorder.events == expected, f"tell() was called with {recorder.events}, and should be with {expected}"


def test_the_observer_hears_which_blocks_arrive(device_blocks):
    recorder = Recorder()
    tier = HostTier(device_blocks, 3, recorder)
    tier.store(2, b"a")
    tier.load([BlockCopy(*tier.hold([b"a"]), 3)])
    tier.collect()
    assert recorder.events[1:] == [("arrive", [BlockCopy(0, 3)])]


def test_a_loaded_block_has_its_bytes_and_other_blocks_are_unchanged(tier, device_blocks):
    before = device_blocks.clone()
    tier.store(2, b"a")
    device_blocks[2] = 0
    tier.load([BlockCopy(*tier.hold([b"a"]), 1)])
    assert torch.equal(device_blocks[1], before[2]), "device block 1 must have the bytes that were stored"
    assert torch.equal(device_blocks[[0, 3]], before[[0, 3]]), "device blocks 0 and 3 must stay as they are"
    assert (tier.num_blocks_stored, tier.num_blocks_loaded) == (1, 1), "one block was stored, and one loaded"


def test_a_load_holds_its_host_blocks_until_it_is_collected(tier):
    tier.store(0, b"a")
    tier.load([BlockCopy(*tier.hold([b"a"]), 3)])
    for block_hash in (b"b", b"c", b"d"):
        tier.store(1, block_hash)
    assert stored(tier, b"a") == [True], "block a was evicted during its load"
    tier.check_integrity()
    assert tier.collect() == [3] and tier.collect() == [], "the load to block 3 has arrived, and is collected once"
    for block_hash in (b"e", b"f", b"g"):
        tier.store(1, block_hash)
    assert stored(tier, b"a") == [False], "the load is over: block a can be evicted"


def test_a_load_on_cuda_runs_on_its_own_stream_after_earlier_work(tier, device_blocks, monkeypatch):
    """The streams are stand-ins, so that this runs on a CPU, too."""
    tier.store(2, b"a")
    device_blocks[1] = 0
    order: list[tuple[str, bool]] = []  # and if device block 1 has its bytes by then

    def note(what: str) -> None:
        order.append((what, bool(device_blocks[1].any())))

    @contextmanager
    def on_stream(stream):
        note("enter")
        yield
        note("leave")

    stream = MagicMock()
    stream.wait_stream.side_effect = stream.wait_event.side_effect = lambda other: note("wait")
    stream.__enter__.side_effect, stream.__exit__.side_effect = lambda: note("enter"), lambda *error: note("leave")
    for name, value in (("current_stream", MagicMock()), ("stream", on_stream), ("Event", MagicMock())):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(tier, "_stream", stream)
    tier.load([BlockCopy(*tier.hold([b"a"]), 1)])
    assert ("wait", False) in order, "before it copies, the load's stream must wait for the stream that computes"
    assert ("enter", False) in order and ("leave", True) in order, "the copy must run on the load's stream"
    assert tier.loads[0].event is not None, "without an event, the load seems to have arrived at once"


def test_loads_are_collected_once_they_have_arrived_or_after_waiting(tier):
    for block, block_hash in enumerate([b"a", b"b"]):
        tier.store(block, block_hash)
    loads = [Load([BlockCopy(*tier.hold([each]), target)], Event()) for each, target in ((b"a", 2), (b"b", 3))]
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
