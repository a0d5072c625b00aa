"""Texts that are evicted from the device are kept on the host, and found there.

Blocks have 4 slots. A text of 9 tokens has two full blocks, and a third one that is not cached.
"""

import random

import pytest

from ..block_manager import BlockManager
from ..prefix_cache import CachedBlock, PrefixCacheStats
from ..sequence import Sequence
from .tiers import BLOCK_SIZE, Tiers

TEXT = list(range(10, 19))
OTHER = list(range(50, 59))
THIRD = list(range(70, 79))


def places(tiers: Tiers, token_ids: list[int]) -> str:
    """Where each block of a text is that is found: d on the device, h on the host, b on both."""
    device, host = tiers.manager.prefix_cache.blocks, tiers.manager.prefix_cache.host_blocks
    names = {(True, False): "d", (False, True): "h", (True, True): "b"}
    return "".join(names[device in hit.places, host in hit.places] for hit in found(tiers, token_ids))


def found(tiers: Tiers, token_ids: list[int]) -> list[CachedBlock]:
    return BlockManager._hits(tiers.manager, tiers.sequence(token_ids))


def evicted(tiers: Tiers) -> None:
    """Somebody needs all blocks of the device, and goes."""
    blocks = tiers.manager._pool.get_new_blocks(tiers.manager.num_free_blocks)
    tiers.kv_cache.blocks[blocks] = float("nan")
    tiers.manager._pool.free_blocks(blocks)
    tiers.manager.check_integrity()


def admitted(tiers: Tiers, token_ids: list[int], name: str = "a") -> Sequence:
    seq = tiers.sequence(token_ids, name)
    tiers.manager.allocate(seq)
    tiers.manager.check_integrity()
    return seq


def tiers_of(num_blocks: int = 4, num_host_blocks: int = 8) -> Tiers:
    return Tiers(num_blocks, num_host_blocks, is_caching=True)


# Evicted and found


def test_what_is_evicted_is_found_on_the_host():
    tiers = tiers_of()
    tiers.left(TEXT)
    assert places(tiers, TEXT) == "dd" and tiers.host_pool.stored.num_blocks == 0, "nothing moves before it must"
    evicted(tiers)
    assert places(tiers, TEXT) == "hh"
    assert tiers.host_pool.stored.num_blocks == 2
    assert tiers.num_free == (4, 8), "what is only cached is free on both tiers"


def test_it_is_restored_with_its_bytes_and_is_then_on_both_tiers():
    tiers = tiers_of()
    tiers.left(TEXT)
    evicted(tiers)
    seq = admitted(tiers, TEXT)
    assert seq.num_computed_tokens == seq.num_cached_tokens == 8
    assert tiers.manager.is_ready(seq) and tiers.host_pool.loaded.num_blocks == 2
    tiers.assert_bytes(seq)
    assert places(tiers, TEXT) == "bb"
    tiers.compute(seq)
    tiers.assert_bytes(seq)
    assert tiers.num_free == (1, 8)
    tiers.manager.free(seq)
    tiers.assert_empty()


def test_the_end_of_a_text_goes_first_and_what_is_on_the_device_is_not_loaded():
    tiers = tiers_of()
    tiers.left(TEXT)
    tiers.left([7] * 12)  # takes the two free blocks and the text's last one
    assert places(tiers, TEXT) == "dh"
    seq = admitted(tiers, TEXT)
    assert seq.num_cached_tokens == 8 and tiers.host_pool.loaded.num_blocks == 1
    tiers.assert_bytes(seq)


def test_a_text_on_both_tiers_is_not_copied_twice():
    tiers = tiers_of()
    tiers.left(TEXT)
    evicted(tiers)
    tiers.manager.free(admitted(tiers, TEXT))
    evicted(tiers)
    assert places(tiers, TEXT) == "hh" and tiers.host_pool.stored.num_blocks == 2


def test_what_was_found_on_the_host_is_counted_and_is_a_hit():
    tiers = tiers_of(num_host_blocks=2)
    tiers.left(TEXT)
    tiers.manager.free(admitted(tiers, TEXT))
    assert tiers.manager.prefix_cache.stats == PrefixCacheStats(queried=18, hit=8, restored=0)
    evicted(tiers)
    tiers.left(OTHER)
    evicted(tiers)
    admitted(tiers, OTHER)
    assert tiers.manager.prefix_cache.stats == PrefixCacheStats(queried=36, hit=16, restored=8)


def test_two_who_want_it_at_once_load_it_once():
    tiers = tiers_of()
    tiers.left(TEXT)
    evicted(tiers)
    tiers.hold_copies_back()
    first, second = admitted(tiers, TEXT), admitted(tiers, TEXT, "b")
    assert first.block_table[:2] == second.block_table[:2] and tiers.num_free == (0, 6)
    assert not tiers.manager.is_ready(first) and not tiers.manager.is_ready(second)
    tiers.host_pool.finish()
    tiers.manager.collect()
    assert tiers.manager.is_ready(first) and tiers.manager.is_ready(second) and tiers.num_free == (0, 8)
    assert tiers.host_pool.loaded.num_blocks == 2
    tiers.assert_bytes(first, second)


def test_a_block_that_is_written_in_place_leaves_the_host_s_copy_as_it_is():
    """The only holder of a cached block writes its own tokens there: the text is then on the host only."""
    tiers = tiers_of()
    tiers.left(TEXT)
    evicted(tiers)
    parent, child = admitted(tiers, TEXT), tiers.sequence([*TEXT[:6], 90, 91, 92], "b")
    tiers.manager.fork(parent, child, 6)
    tiers.manager.free(parent)
    assert tiers.manager.append_slot(child) is None and places(tiers, TEXT) == "bh"
    tiers.compute(child)
    tiers.assert_bytes(child)
    tiers.manager.free(child)
    evicted(tiers)
    seq = admitted(tiers, TEXT)
    assert seq.num_cached_tokens == 8
    tiers.assert_bytes(seq)


def test_a_text_that_is_computed_again_is_on_the_device_again():
    """Its last token must be computed, and with it the whole block: nothing is loaded for that."""
    tiers = tiers_of()
    tiers.left(TEXT[:4])
    evicted(tiers)
    seq = admitted(tiers, TEXT[:4])
    assert seq.num_cached_tokens == 0 and tiers.host_pool.loaded.num_blocks == 0
    tiers.compute(seq)
    assert places(tiers, TEXT) == "b"
    tiers.assert_bytes(seq)


def test_a_fork_goes_on_from_its_parent_and_not_from_the_host():
    """To be ready at once: what is on the host only is no hit for a sequence that can share."""
    tiers = tiers_of(num_blocks=8)
    tiers.left([*TEXT[:4], *OTHER])
    evicted(tiers)
    parent, child = tiers.running(TEXT), tiers.sequence([*TEXT[:4], *OTHER], "b")
    num_loaded = tiers.host_pool.loaded.num_blocks
    tiers.manager.fork(parent, child, 4)
    assert child.num_computed_tokens == 4 and child.block_table == parent.block_table[:1]
    assert tiers.host_pool.loaded.num_blocks == num_loaded
    tiers.manager.check_integrity()


# The host's room


def test_the_host_forgets_the_least_recently_used_and_the_end_of_a_text_first():
    tiers = tiers_of(num_host_blocks=3)
    tiers.left(TEXT)
    evicted(tiers)
    tiers.left(OTHER)
    evicted(tiers)
    assert (places(tiers, TEXT), places(tiers, OTHER)) == ("h", "hh")
    tiers.left(THIRD)
    evicted(tiers)
    assert (places(tiers, TEXT), places(tiers, OTHER), places(tiers, THIRD)) == ("", "h", "hh")
    assert tiers.num_free == (4, 3)
    tiers.manager.check_integrity()


def test_what_was_found_on_the_host_stays_there_longest():
    tiers = tiers_of(num_host_blocks=4)
    for text in (TEXT, OTHER):
        tiers.left(text)
        evicted(tiers)
    tiers.manager.free(admitted(tiers, TEXT))
    evicted(tiers)
    tiers.left(THIRD)
    evicted(tiers)
    assert (places(tiers, TEXT), places(tiers, OTHER), places(tiers, THIRD)) == ("hh", "", "hh")


def test_a_host_that_is_full_of_swapped_groups_keeps_no_texts():
    tiers = tiers_of(num_host_blocks=3)
    away = tiers.running([7] * 10, "b")
    tiers.manager.swap_out([away])
    tiers.left(TEXT)
    evicted(tiers)
    assert places(tiers, TEXT) == "" and tiers.host_pool.stored.num_blocks == 3
    assert not [text for text in tiers.manager.prefix_cache._index.values() if not text.places]
    tiers.manager.swap_in([away])
    tiers.assert_bytes(away)


def test_a_swapped_group_takes_the_room_of_texts():
    tiers = tiers_of(num_host_blocks=3)
    tiers.left(TEXT)
    evicted(tiers)
    away = tiers.running([7] * 6, "b")
    tiers.manager.swap_out([away])
    assert places(tiers, TEXT) == "h"
    evicted(tiers)
    tiers.manager.swap_in([away])
    tiers.assert_bytes(away)
    tiers.manager.check_integrity()


def test_without_a_host_what_is_evicted_is_forgotten():
    tiers = tiers_of(num_host_blocks=0)
    tiers.left(TEXT)
    evicted(tiers)
    assert places(tiers, TEXT) == "" and tiers.host_pool.stored.num_blocks == 0


def test_to_make_room_for_a_text_that_is_loaded_others_are_evicted_to_the_host():
    """If the host is full it gives up what it has longest, but nothing that is being loaded."""
    tiers = tiers_of(num_blocks=3, num_host_blocks=2)
    tiers.left(TEXT)
    evicted(tiers)
    tiers.left(OTHER)
    assert (places(tiers, TEXT), places(tiers, OTHER)) == ("hh", "dd")
    seq = admitted(tiers, TEXT)
    tiers.assert_bytes(seq)
    assert seq.num_cached_tokens == 8 and (places(tiers, TEXT), places(tiers, OTHER)) == ("bd", "h")
    tiers.manager.check_integrity()


def test_what_is_hit_on_the_device_is_not_evicted_to_load_the_rest():
    tiers = tiers_of(num_blocks=3)
    tiers.left(TEXT)
    tiers.left([7] * 8)
    assert places(tiers, TEXT) == "dh"
    seq = admitted(tiers, TEXT)
    assert seq.num_cached_tokens == 8 and len(set(seq.block_table)) == 3
    tiers.assert_bytes(seq)


def test_a_reset_clears_both_tiers():
    tiers = tiers_of()
    tiers.left(TEXT)
    evicted(tiers)
    tiers.left(OTHER)
    assert (places(tiers, TEXT), places(tiers, OTHER)) == ("hh", "dd")
    assert tiers.manager.reset_prefix_cache() is True
    assert (places(tiers, TEXT), places(tiers, OTHER)) == ("", "")
    assert not tiers.manager.prefix_cache._index and tiers.manager.prefix_cache.stats == PrefixCacheStats()
    assert tiers.manager.prefix_cache.host_blocks.num_idle == tiers.manager.prefix_cache.blocks.num_idle == 0
    tiers.assert_empty()


def hold_blocks(tiers: Tiers) -> None:
    tiers.running(OTHER)


def wait_on_the_host(tiers: Tiers) -> None:
    tiers.manager.swap_out([tiers.running(OTHER)])


def be_copied(tiers: Tiers) -> None:
    """Nobody holds them any more, but for the copy."""
    seq = tiers.running(OTHER)
    tiers.hold_copies_back()
    tiers.manager.swap_out([seq])
    tiers.manager.drop(seq)


@pytest.mark.parametrize("in_the_way", [hold_blocks, wait_on_the_host, be_copied])
def test_a_reset_while_somebody_holds_blocks_or_copies_are_on_their_way_changes_nothing(in_the_way):
    tiers = tiers_of(num_host_blocks=12)
    tiers.left(TEXT)
    in_the_way(tiers)
    before, text = tiers.state(), places(tiers, TEXT)
    assert text and tiers.manager.reset_prefix_cache() is False
    assert (tiers.state(), places(tiers, TEXT)) == (before, text)


# Copies that fail, and that take their time


def test_a_store_that_fails_is_a_text_less_and_leaks_nothing():
    tiers = tiers_of()
    tiers.left(TEXT)
    tiers.fail_copies()
    evicted(tiers)
    assert places(tiers, TEXT) == "" and tiers.num_free == (4, 8)
    assert not tiers.manager.is_copying
    tiers.fail_copies(False)
    seq = tiers.running(TEXT)
    tiers.assert_bytes(seq)


def test_a_load_that_fails_is_a_miss_and_leaks_nothing():
    tiers = tiers_of()
    tiers.left(TEXT)
    evicted(tiers)
    tiers.fail_copies()
    seq = admitted(tiers, TEXT)
    assert (seq.num_computed_tokens, seq.num_cached_tokens, len(seq.block_table)) == (0, 0, 3)
    assert tiers.num_free == (1, 8) and not tiers.manager.is_copying and places(tiers, TEXT) == "hh"
    assert tiers.manager.prefix_cache.stats == PrefixCacheStats(queried=18)
    tiers.compute(seq)
    tiers.assert_bytes(seq)
    tiers.manager.free(seq)
    tiers.assert_empty()


def test_an_interrupt_in_the_middle_of_a_load_loses_no_block(monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    tiers = tiers_of(num_blocks=3)
    tiers.left(TEXT)
    tiers.left([7] * 8)
    assert places(tiers, TEXT) == "dh"
    monkeypatch.setattr(tiers.host_pool, "load", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tiers.manager.allocate(tiers.sequence(TEXT))
    assert tiers.num_free == (3, 8)
    tiers.assert_empty()


def test_if_a_load_fails_what_is_on_the_device_before_it_is_hit():
    tiers = tiers_of()
    tiers.left(TEXT)
    tiers.left([7] * 12)
    assert places(tiers, TEXT) == "dh"
    tiers.fail_copies()
    seq = admitted(tiers, TEXT)
    assert seq.num_cached_tokens == 4 and len(seq.block_table) == 3
    tiers.assert_bytes(seq)


def with_a_gap(tiers: Tiers) -> Sequence:
    """TEXT's first block is on the host only; its second on the device, and who holds that computed the first itself.

    Two had the same text at once; the first block of the one stays in the index and leaves with it, the second one of
    the other does.
    """
    one, two = admitted(tiers, TEXT, "b"), admitted(tiers, TEXT, "c")
    tiers.compute(one, 4)
    tiers.compute(two)
    tiers.manager.free(one)
    evicted(tiers)
    assert places(tiers, TEXT) == "hd"
    return two


def test_what_is_on_the_device_behind_a_gap_is_hit():
    tiers = tiers_of(num_blocks=6)
    two = with_a_gap(tiers)
    seq = admitted(tiers, TEXT)
    assert seq.num_cached_tokens == 8 and tiers.host_pool.loaded.num_blocks == 1
    tiers.assert_bytes(seq, two)


def test_a_sequence_is_admitted_only_if_there_is_room_though_a_load_fails():
    """Behind the gap nothing is hit then: it takes three blocks and not two."""
    tiers = tiers_of(num_blocks=6)
    with_a_gap(tiers)
    blocker = tiers.running([7], "d")
    tiers.fail_copies()
    seq = tiers.sequence(TEXT)
    assert tiers.num_free[0] == 2 and not tiers.manager.can_allocate(seq)
    tiers.manager.free(blocker)
    assert tiers.manager.can_allocate(seq)
    tiers.manager.allocate(seq)
    assert seq.num_cached_tokens == 0 and len(seq.block_table) == 3
    tiers.manager.check_integrity()


def test_who_waits_for_its_text_is_not_ready_and_holds_it_on_both_tiers():
    tiers = tiers_of()
    tiers.left(TEXT)
    evicted(tiers)
    tiers.hold_copies_back()
    seq = admitted(tiers, TEXT)
    assert not tiers.manager.is_ready(seq) and tiers.manager.is_copying and not tiers.manager.is_storing
    assert tiers.num_free == (1, 6)
    tiers.host_pool.finish()
    tiers.manager.collect()
    assert tiers.manager.is_ready(seq) and tiers.num_free == (1, 8)
    tiers.assert_bytes(seq)


def test_who_is_freed_while_its_text_arrives_leaves_it_cached_with_its_bytes():
    tiers = tiers_of()
    tiers.left(TEXT)
    evicted(tiers)
    tiers.hold_copies_back()
    tiers.manager.free(admitted(tiers, TEXT))
    tiers.manager.check_integrity()
    assert places(tiers, TEXT) == "bb"
    seq = admitted(tiers, TEXT)
    assert tiers.manager.is_ready(seq)
    tiers.assert_bytes(seq)


def test_who_writes_to_the_block_of_an_evicted_text_waits_until_it_is_stored():
    tiers = tiers_of()
    tiers.left(TEXT)
    tiers.hold_copies_back()
    seq = tiers.running([7] * 15, "b")  # all four blocks, at once
    tiers.manager.collect(wait=True)
    assert places(tiers, TEXT) == "hh"
    tiers.manager.free(seq)
    again = admitted(tiers, TEXT)
    tiers.manager.collect(wait=True)
    tiers.assert_bytes(again)


def test_a_text_that_is_still_being_stored_is_found():
    tiers = tiers_of()
    tiers.left(TEXT)
    tiers.host_pool.is_late = lambda: True
    blocks = tiers.manager._pool.get_new_blocks(4)
    tiers.manager._pool.free_blocks(blocks)
    assert places(tiers, TEXT) == "hh"
    seq = admitted(tiers, TEXT)
    tiers.manager.collect(wait=True)
    tiers.assert_bytes(seq)


# Any history


@pytest.mark.parametrize("seed", range(40))
def test_in_any_history_who_hits_finds_the_bytes_of_its_text(seed):
    """Few tokens, so that texts begin alike; small pools, so that they are evicted; copies are late, and fail."""
    rng = random.Random(seed)
    tiers = tiers_of(rng.randrange(3, 12), rng.randrange(0, 12))
    manager = tiers.manager
    running: list[Sequence] = []
    tiers.host_pool.is_late = lambda: rng.random() < 0.5
    tiers.host_pool.fails = lambda: rng.random() < 0.15
    for number in range(150):
        manager.collect()
        action = rng.choice(["come", "come", "compute", "compute", "grow", "end", "finish"])
        seq = rng.choice(running) if running else None
        if action == "come":
            new = tiers.sequence([rng.randrange(2) for _ in range(rng.randrange(1, 3 * BLOCK_SIZE + 2))], str(number))
            if manager.can_allocate(new):
                manager.allocate(new)
                running.append(new)
        elif action == "compute" and seq and seq.num_uncomputed_tokens and manager.is_ready(seq):
            tiers.compute(seq, rng.randrange(1, seq.num_uncomputed_tokens + 1))
        elif action == "grow" and seq and not seq.num_uncomputed_tokens and manager.num_free_blocks:
            seq.token_ids.append(rng.randrange(2))
            manager.append_slot(seq)
        elif action == "end" and seq:
            running.remove(seq)
            manager.free(seq)
        elif action == "finish":
            tiers.host_pool.finish()
        manager.check_integrity()
        tiers.assert_bytes(*(seq for seq in running if manager.has_arrived(seq) and seq.num_computed_tokens))
    for seq in running:
        manager.free(seq)
    tiers.assert_empty()
    assert all(text.places for text in manager.prefix_cache._index.values())
