"""BlockManager with two tiers: evicted blocks are stored, hits on the host are loaded, and nothing is read too early.

Blocks have 4 slots. A text of 9 tokens has two full blocks, and a third one that is not cached.
"""

import random
from typing import NoReturn

import pytest

from ...engine.block_pool import NoFreeBlocks
from ...engine.prefix_cache import PrefixCacheStats
from ...engine.sequence import Sequence
from ..testing.sequences import admit, fits, on_evict
from ..testing.tiers import CopyFailed, SlowHostTier, Tiers

TEXT = list(range(10, 19))
OTHER = list(range(50, 59))
THIRD = list(range(70, 79))


def on_the_host(num_blocks: int = 4, num_host_blocks: int = 8) -> Tiers:
    """Return tiers in which TEXT was computed and then evicted from the device."""
    tiers = Tiers(num_blocks, num_host_blocks)
    tiers.left(TEXT)
    tiers.evict()
    return tiers


# Stores


def test_evicted_text_is_on_the_host():
    tiers = Tiers()
    tiers.left(TEXT)
    assert tiers.places(TEXT) == "dd" and tiers.moved == (0, 0), "nothing moves before it must"
    tiers.evict()
    assert tiers.places(TEXT) == "hh" and tiers.moved == (2, 0)
    assert tiers.num_free == (4, 8), "a block that is only cached is free on both tiers"


def test_store_completes_before_the_block_is_taken():
    """The store sees the old text in the block and in the index."""
    tiers = Tiers()
    tiers.left(TEXT)
    seen: list[tuple[int, str]] = []
    store = tiers.host.store

    def watched(block, block_hash):
        assert tiers.manager.pool.ref_counts[block] == 0, "the block is taken already"
        seen.append((block, tiers.places(TEXT)))
        store(block, block_hash)

    on_evict(tiers.manager.pool, watched)
    tiers.evict()
    assert [places for _, places in seen] == ["dd", "dh"], "the end first"
    assert tiers.places(TEXT) == "hh"


def test_text_on_the_host_is_renewed_without_a_copy():
    """TEXT is loaded, OTHER is stored, and only then is TEXT evicted again."""
    tiers = on_the_host(num_blocks=8, num_host_blocks=4)
    seq = tiers.admitted(TEXT)
    tiers.manager.collect_loads()
    tiers.left(OTHER)
    tiers.evict()
    tiers.manager.free(seq)
    assert (tiers.places(TEXT), tiers.places(OTHER), tiers.moved) == ("bb", "hh", (4, 2))
    tiers.evict()
    assert tiers.moved == (4, 2), "it is still there"
    tiers.left(THIRD)
    tiers.evict()
    assert (tiers.places(TEXT), tiers.places(OTHER), tiers.places(THIRD)) == ("hh", "--", "hh")


def test_host_whose_blocks_are_all_loading_drops_the_text():
    tiers = on_the_host(num_blocks=5, num_host_blocks=2)
    tiers.left(OTHER)
    tiers.host.arrives = lambda: False
    seq = tiers.admitted(TEXT)  # takes all blocks but OTHER's
    assert tiers.num_free == (2, 0) and tiers.places(OTHER) == "dd"
    tiers.evict()
    assert tiers.places(OTHER) == "--" and tiers.moved == (2, 2)
    tiers.manager.collect_loads(wait=True)
    tiers.assert_bytes(seq)


def test_failed_store_takes_nothing_and_leaks_nothing():
    tiers = Tiers()
    tiers.left(TEXT)
    before = tiers.state()
    tiers.host.fails = lambda: True
    with pytest.raises(CopyFailed):
        tiers.evict()
    tiers.manager.check_integrity()
    assert tiers.state() == before and tiers.places(TEXT) == "dd"
    tiers.host.fails = lambda: False
    tiers.evict()
    assert tiers.places(TEXT) == "hh"


# Loads


def test_loaded_text_has_its_bytes_and_is_on_both_tiers():
    tiers = on_the_host()
    seq = tiers.admitted(TEXT)
    assert seq.num_computed_tokens == 8 and tiers.moved == (2, 2)
    tiers.manager.collect_loads()
    tiers.assert_bytes(seq)
    assert tiers.places(TEXT) == "bb" and tiers.num_free == (1, 8)
    tiers.compute(seq)
    tiers.assert_bytes(seq)
    tiers.manager.free(seq)
    tiers.assert_empty()


def test_blocks_on_the_device_are_not_loaded():
    tiers = Tiers()
    tiers.left(TEXT)
    tiers.left([7] * 12)  # takes the two free blocks and the end of the text
    assert tiers.places(TEXT) == "dh"
    seq = tiers.admitted(TEXT)
    assert seq.num_computed_tokens == 8 and tiers.moved[1] == 1
    tiers.manager.collect_loads()
    tiers.assert_bytes(seq)


def test_hits_on_the_device_are_not_evicted_to_load_the_rest():
    tiers = Tiers(num_blocks=3)
    tiers.left(TEXT)
    tiers.left([7] * 8)
    assert tiers.places(TEXT) == "dh"
    seq = tiers.admitted(TEXT)
    assert seq.num_computed_tokens == 8 and len(set(seq.block_table)) == 3
    tiers.manager.collect_loads()
    tiers.assert_bytes(seq)


@pytest.mark.parametrize("num_free", range(5))
@pytest.mark.parametrize("is_held", [False, True])
def test_idle_hits_and_host_hits_need_a_block_each_and_held_ones_none(is_held, num_free):
    """TEXT's first block is on the device, its second on the host, and its third on neither."""
    tiers = Tiers(num_blocks=6)
    tiers.left(TEXT)
    tiers.left([7] * 20)
    assert tiers.places(TEXT) == "dh"
    if is_held:
        tiers.admitted([*TEXT[:4], 90], "holder")
    taken = tiers.manager.pool.get_new_blocks(tiers.num_free[0] - num_free)
    seq, needed = tiers.sequence(TEXT), 2 if is_held else 3
    assert fits(tiers.manager, seq) == (num_free >= needed)
    assert [fits(tiers.manager, seq, spare) for spare in (1, 2)] == [num_free >= needed + s for s in (1, 2)]
    if num_free < needed:
        with pytest.raises(NoFreeBlocks):
            admit(tiers.manager, seq)
    else:
        admit(tiers.manager, seq)
        assert tiers.num_free[0] == num_free - needed
    tiers.manager.pool.free_blocks(taken)
    tiers.manager.check_integrity()


def raise_in(tiers: Tiers, part: str) -> None:
    """Make the next allocation fail there."""

    def fail(*_) -> NoReturn:
        raise CopyFailed

    if part == "get_new_blocks":
        tiers.manager.pool.get_new_blocks(tiers.num_free[0] - 1)
    elif part == "store":
        on_evict(tiers.manager.pool, fail)
    else:
        tiers.host.load = fail  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize("part", ["get_new_blocks", "store", "load"])
def test_failed_allocation_releases_the_blocks_of_both_tiers(part):
    """It has a hit on each tier, and must evict a block for the load."""
    tiers = Tiers(num_blocks=3)
    tiers.left(TEXT)
    tiers.left([7] * 8)
    assert tiers.places(TEXT) == "dh"
    raise_in(tiers, part)
    before, places = tiers.state(), tiers.places(TEXT)
    seq = tiers.sequence(TEXT)
    with pytest.raises(NoFreeBlocks if part == "get_new_blocks" else CopyFailed):
        admit(tiers.manager, seq)
    assert tiers.state() == before and tiers.places(TEXT) == places
    assert (seq.block_table, seq.num_computed_tokens) == ([], 0)
    if part != "get_new_blocks":
        tiers.manager.check_integrity()


# Loading


def arriving(num_blocks: int = 8) -> tuple[Tiers, Sequence]:
    """Return a sequence whose first two blocks are loading."""
    tiers = on_the_host(num_blocks)
    tiers.host.arrives = lambda: False
    return tiers, tiers.admitted(TEXT)


def test_load_holds_the_hosts_blocks_until_it_has_arrived():
    tiers, seq = arriving()
    assert not tiers.manager.is_ready(seq) and tiers.num_free == (5, 6)
    tiers.manager.collect_loads()
    assert not tiers.manager.is_ready(seq) and tiers.num_free == (5, 6)
    tiers.host.arrives = lambda: True
    assert tiers.manager.is_ready(seq), "a sequence may run as soon as its blocks have arrived"
    tiers.manager.collect_loads()
    assert tiers.manager.is_ready(seq) and tiers.num_free == (5, 8)
    tiers.assert_bytes(seq)


def test_another_sequence_may_hit_a_loading_block_and_waits_with_it():
    tiers, seq = arriving()
    other = tiers.admitted([*TEXT, 99], "b")
    assert other.block_table[:2] == seq.block_table[:2] and tiers.moved == (2, 2), "it is loaded once"
    stranger = tiers.admitted([7], "c")
    assert [tiers.manager.is_ready(each) for each in (seq, other, stranger)] == [False, False, True]
    tiers.manager.collect_loads(wait=True)
    assert tiers.manager.is_ready(other)
    tiers.assert_bytes(seq, other)


def test_blocks_of_an_abandoned_load_are_free_once_it_has_arrived():
    """Otherwise the load would overwrite their next holder. Nothing waits for this."""
    tiers, seq = arriving(num_blocks=4)
    tiers.manager.free(seq)
    tiers.manager.check_integrity()
    assert tiers.num_free == (2, 6), "the load holds its sources and targets"
    with pytest.raises(NoFreeBlocks):
        tiers.manager.pool.get_new_blocks(3)
    tiers.manager.collect_loads()
    assert tiers.num_free == (2, 6), "it has not arrived"
    tiers.manager.collect_loads(wait=True)
    tiers.assert_empty()
    assert tiers.places(TEXT) == "bb"
    again = tiers.admitted(TEXT)
    assert tiers.manager.is_ready(again) and tiers.moved[1] == 2, "the loaded block is cached"
    tiers.assert_bytes(again)


class LosingTier(SlowHostTier):
    """A tier that loses these targets."""

    loses: set[int]

    def collect(self, wait: bool = False) -> tuple[list[int], list[int]]:
        finished, _ = super().collect(wait)
        return [block for block in finished if block not in self.loses], [b for b in finished if b in self.loses]


def test_all_holders_of_all_lost_blocks_start_over():
    """Two loads are collected at once. One loses both of its blocks, the other one block."""
    tiers = Tiers(num_blocks=12, tier=LosingTier)
    for text in (TEXT, OTHER, THIRD):
        tiers.left(text)
    tiers.evict()
    first, second, third = (tiers.admitted(text) for text in (TEXT, OTHER, THIRD))
    sharing = tiers.admitted([*OTHER[:4], 99])
    tiers.host.loses = {*first.block_table[:2], second.block_table[0]}
    tiers.manager.collect_loads()
    ready = [tiers.manager.is_ready(seq) for seq in (first, second, sharing, third)]
    assert ready == [False, False, False, True]
    tiers.manager.check_integrity()
    for seq in (first, second, sharing):
        tiers.manager.free(seq)
        tiers.compute(tiers.admitted(seq.token_ids))


# Reset


def test_reset_empties_both_tiers():
    tiers = on_the_host()
    tiers.left(OTHER)
    assert (tiers.places(TEXT), tiers.places(OTHER)) == ("hh", "dd")
    assert tiers.manager.reset_prefix_cache() is True
    assert (tiers.places(TEXT), tiers.places(OTHER)) == ("--", "--")
    assert tiers.manager.prefix_cache_stats == PrefixCacheStats(queries=18), "the counts continue"
    tiers.assert_empty()
    tiers.evict()
    assert tiers.moved == (2, 0), "no text was left to store"


def test_reset_waits_for_an_abandoned_load():
    """Otherwise it would write to a block of the next text, and the host would keep what the reset removes."""
    tiers, seq = arriving()
    tiers.manager.free(seq)
    assert tiers.host.loads and tiers.manager.reset_prefix_cache() is True
    assert not tiers.host.loads and tiers.places(TEXT) == "--"
    tiers.assert_empty()


def test_reset_while_blocks_are_held_or_loading_changes_nothing():
    tiers, _ = arriving()
    before = tiers.state()
    assert tiers.manager.reset_prefix_cache() is False
    assert tiers.state() == before and tiers.places(TEXT) == "bb"


# Random histories


@pytest.mark.parametrize("seed", range(30))
def test_in_random_histories_hits_hold_what_was_computed_for_that_text(seed):
    rng = random.Random(seed)
    tiers = Tiers(num_blocks=rng.randrange(4, 12), num_host_blocks=rng.choice([0, 1, 3, 20]))
    slow, failing = rng.choice([0.0, 0.5, 0.9]), rng.choice([0.0, 0.0, 0.2])
    tiers.host.arrives = lambda: rng.random() >= slow
    tiers.host.fails = lambda: rng.random() < failing
    running: list[Sequence] = []
    for _ in range(150):
        if running and rng.random() < 0.5:
            seq = running.pop(rng.randrange(len(running)))
            if tiers.manager.is_ready(seq) and rng.random() < 0.8:
                tiers.compute(seq)
                tiers.assert_bytes(seq)
            tiers.manager.free(seq)
        else:
            seq = tiers.sequence([10 + rng.randrange(2) for _ in range(rng.randrange(1, 16))])
            has_room = fits(tiers.manager, seq)
            try:
                admit(tiers.manager, seq)
                running.append(seq)
                assert has_room
            except NoFreeBlocks:
                assert not has_room
            except CopyFailed:
                assert seq.block_table == []
        tiers.manager.collect_loads()
        tiers.manager.check_integrity()
        tiers.assert_bytes(*(seq for seq in running if seq.num_computed_tokens and tiers.manager.is_ready(seq)))
    for seq in running:
        tiers.manager.free(seq)
    tiers.assert_empty()
