"""Helpers of claims.ipynb, on a few bytes and blocks."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from notebooks import helpers
from notebooks.helpers.claims import (
    books,
    calculator,
    counters,
    slabs,
    states,
    table,
    told,
    told_index,
    told_offload,
    victims,
)
from notebooks.helpers.claims.caching_allocator import MB, CachingAllocator, OutOfMemory
from notebooks.helpers.claims.slabs import Full, SlabAllocator
from stages.bench import claims, locality, results
from stages.bench.engines import silent
from stages.s7_cpu_offload.llama import ModelConfig

MODULES = sorted(path.stem for path in (Path(helpers.__file__).parent / "claims").glob("[a-z]*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    assert doctest.testmod(import_module(f"notebooks.helpers.claims.{name}")).failed == 0


def test_docstring_examples_of_the_benches():
    assert doctest.testmod(locality).failed == doctest.testmod(claims).failed == 0


# ---- slabs


def test_empty_slab_can_serve_another_class():
    allocator = SlabAllocator([16, 64], num_slabs=1, slab_size=64)
    small = allocator.allocate(10)
    assert (small.size, allocator.held, allocator.asked) == (16, 16, 10)
    with pytest.raises(Full, match=r"no piece of 64 bytes is left, 48 bytes are free"):
        allocator.allocate(20)
    allocator.free(small)
    assert allocator.allocate(20).size == 64
    allocator.check_integrity()


def test_full_class_refuses_or_borrows():
    for partition, size in (("fixed", None), ("borrow", 64)):
        allocator = SlabAllocator([32, 64], num_slabs=2, slab_size=64, partition=partition)
        for _ in range(2):
            assert allocator.allocate(20).size == 32
        if size is None:
            with pytest.raises(Full, match="32 bytes"):
                allocator.allocate(20)
        else:
            assert allocator.allocate(20).size == size
        allocator.check_integrity()


def test_size_errors_name_both_numbers():
    with pytest.raises(Full, match="100 bytes: the largest class has 64"):
        SlabAllocator([64], 1, 64).allocate(100)
    with pytest.raises(ValueError, match="a class of 128 bytes does not fit a slab of 64"):
        SlabAllocator([128], 1, 64)


def test_random_traffic_frees_all_pieces():
    for partition in ("fixed", "borrow", "shared"):
        served = slabs.serve(SlabAllocator(slabs.POWERS, 8, 16 * slabs.MB, partition), 400)
        assert 0 < served.inside < 0.6 and 0 <= served.refused < 1


# ---- the caching allocator


def sizes(allocator):
    return [[(b["size"] // MB, b["state"]) for b in s["blocks"]] for s in allocator.snapshot()]


def test_allocator_splits_joins_and_keeps_blocks():
    allocator = CachingAllocator(64 * MB)
    a, b = allocator.malloc(6 * MB), allocator.malloc(5 * MB)
    assert sizes(allocator) == [[(6, "active_allocated"), (5, "active_allocated"), (9, "inactive")]]
    allocator.free(a)
    allocator.free(b)
    assert sizes(allocator) == [[(20, "inactive")]]
    assert (allocator.reserved, allocator.allocated, allocator.num_device_mallocs) == (20 * MB, 0, 1)


def test_sizes_are_rounded_and_small_blocks_have_their_own_segments():
    allocator = CachingAllocator(64 * MB)
    assert allocator.malloc(1).size == 512
    assert allocator.malloc(2 * MB).segment != 1 and allocator.reserved == 22 * MB
    allocator.malloc(19 * MB)  # more than is left in the segment of 20 MB
    assert allocator.reserved == 42 * MB


def test_small_remainder_is_not_split_off():
    """A request for 19.5 MB takes a whole block of 20 MB."""
    allocator = CachingAllocator(64 * MB)
    first = allocator.malloc(20 * MB)
    allocator.free(first)
    assert allocator.malloc(20 * MB - MB // 2).size == 20 * MB


def test_cached_segments_are_freed_before_memory_runs_out():
    allocator = CachingAllocator(40 * MB)
    allocator.free(allocator.malloc(30 * MB))
    assert allocator.malloc(36 * MB).size == 36 * MB and allocator.num_device_frees == 1
    with pytest.raises(OutOfMemory, match=r"10,485,760 bytes: 0 are reserved and free, 4,194,304 unreserved"):
        allocator.malloc(10 * MB)


def test_small_requests_do_not_get_blocks_above_the_split_limit():
    for limit, reserved in ((None, 40), (16 * MB, 60)):
        allocator = CachingAllocator(128 * MB, max_split_size=limit)
        allocator.free(allocator.malloc(40 * MB))
        allocator.malloc(5 * MB)
        assert allocator.reserved == reserved * MB


def test_garbage_collection_frees_segments_early():
    kept = []
    for threshold in (0.0, 0.5):
        allocator = CachingAllocator(100 * MB, garbage_collection=threshold)
        allocator.free(allocator.malloc(40 * MB))
        allocator.malloc(44 * MB)
        kept.append(allocator.reserved // MB)
    assert kept == [84, 44]


# ---- the books


def test_bitmap_pool_has_the_same_methods():
    pool = books.BitmapPool(4)
    assert pool.get_new_blocks(3) == [0, 1, 2] and str(pool) == "0001"
    pool.free_blocks([1])
    assert pool.get_new_blocks(1) == [1]
    with pytest.raises(ValueError, match="2 blocks are needed, 1 are free"):
        pool.get_new_blocks(2)
    with pytest.raises(ValueError, match="block 3 is given back twice"):
        pool.free_blocks([3])


def test_list_and_bitmap_take_different_blocks():
    *_, (_, listed, mapped) = books.side_by_side()
    assert listed == "[0][4][5][6][7]" and mapped == "00101111"


# ---- code of the texts


def test_first_offload_of_the_text_raises():
    first, second = told_offload.of_offload()
    assert first.told.startswith("IndexError") and second.told.startswith("-1")
    assert told_offload.stored(row_by_id=True, holds_until_copied=True) == 7.0
    for num_gpu in range(1, 9):
        with pytest.raises(IndexError):
            pools = told_offload.Offload(num_gpu, 4)
            pools.offload(pools.gpu_free.pop())


def test_eviction_of_the_text_drops_held_blocks():
    lru = told_index.EvictsOldest()
    lru.use(0, count=1)
    lru.use(1, count=0)
    assert lru.evict() == 1 and 0 not in lru.lru, "the held block 0 must have left the order"
    assert "block 0" in told_index.evictable_after()


def test_faults_of_the_index():
    answers = [case.told.split(":")[0].split(",")[0] for case in told_index.of_index()]
    assert answers == ["2", "32", "32", "none"]
    assert [case.ours.split(":")[0] for case in told_index.of_index()] == ["3", "0", "0", "block 0"]


def test_other_faults():
    assert [case.told[0] for case in told.of_blocks()[:2]] == ["0", "3"]
    assert "pop from empty list" in told.of_append_slot().told and "nothing changed" in told.of_append_slot().ours
    assert told.of_fork().ours.startswith("the parent copies, the child writes in place")
    assert [pieces for _, pieces, *_ in told_offload.offsets(layers=3)] == [1, 6]


# ---- the rest


def test_diagram_of_states_matches_the_engines_events():
    states.check()
    assert states.draw().get_suptitle()


def test_every_choice_of_victim_serves_all_requests(monkeypatch):
    monkeypatch.setenv("NOTEBOOKS_QUICK", "1")
    tolls = victims.compare(48, seeds=1)
    assert len(tolls) == 4 and all(toll.preemptions > 0 for toll in tolls.values())


def test_only_a_lone_sequence_grows_above_95_percent():
    """Two sequences hold 19 of 20 blocks, which is 95%, and then a third holds the last one."""
    manager = victims.PreemptsAbove95(20, 4, silent("s4"))
    two = [told.sequence("s4", name, [1] * 4 * size) for name, size in (("a", 10), ("b", 9))]
    for seq in two:
        manager.allocate(seq)
    assert all(manager.can_append(seq) for seq in two)
    manager.allocate(told.sequence("s4", "c", [1]))
    assert not any(manager.can_append(seq) for seq in two)
    alone, manager = told.sequence("s4", "d", [1] * 80), victims.PreemptsAbove95(20, 4, silent("s4"))
    manager.allocate(alone)
    assert manager.can_append(alone)


def test_counters_add_up():
    moments, watermark = counters.watch(num_requests=6)
    blocks = {state.held + state.idle + state.free for state in moments}
    assert len(blocks) == 1 and 0 < watermark < blocks.pop() / 4
    assert moments[-1].running == moments[-1].waiting == moments[-1].held == 0
    assert moments[-1].preemptions > 0


def test_calculator():
    """One layer's weights, and the rest of 1 MB in blocks of 4 tokens: keys and values of 2 heads of 2, in 4 bytes."""
    import torch

    model = ModelConfig(16, 4, 8, 1, 2, 2, 2)
    fit = calculator.fit(model, 1e6, torch.float32, block_size=4, max_model_len=100, mean_tokens=10, utilization=1.0)
    assert fit.pool == 1_000_000 - fit.weights and fit.blocks == fit.pool // (4 * 2 * 2 * 2 * 4)
    assert (fit.contiguous, fit.paged) == (fit.tokens // 100, fit.blocks // 3)
    with pytest.raises(ValueError, match=r"the weights take .* GB, 0.0 GB are there"):
        calculator.fit(model, 100.0)


def test_table_folds_findings_after_the_third():
    findings = [table.Finding(n, f"claim {n}", (table.BLOG,), "so", "a|b", "holds") for n in (5, 1, 2, 3, 4)]
    head, folded = table.table(findings).split("<details>")
    assert head.count("claim ") == 4  # the heading's "claim |", and three rows
    assert "claim 1" in head and "<summary>2 more</summary>" in folded and r"a\|b" in folded


def test_missing_figures_read_not_measured_yet():
    assert table.committed("claims.nothing.at_all").text() == "not measured yet"
    assert table.in_words(table.committed("claims.nothing.at_all"), "a", "b", "c") == "not measured yet"


def test_committed_figures_are_within_their_spread():
    figures = results.read()["claims"]
    pairs = [
        (part[name], part[f"{name}_spread"]) for part in figures.values() if isinstance(part, dict) for name in part
        if f"{name}_spread" in part
    ]  # fmt: skip
    assert len(pairs) > 40 and all(least <= value <= largest for value, (least, largest) in pairs)


def test_disk_is_written_and_read(tmp_path):
    assert {"write_ms", "cold_read_ms", "warm_read_ms"} <= locality.disk(rounds=1, num_blocks=1, folder=tmp_path).keys()


def test_reads_are_compared_in_both_orders():
    figures = locality.reads(rounds=1, num_bytes=2**20, most=64)
    assert {str(piece) for piece in locality.PIECES} <= figures.keys()


@pytest.mark.full
def test_timed_parts_have_spreads(tmp_path):
    for part in (claims.fork(rounds=1), claims.books(rounds=1, times=10), claims.moving(rounds=1, num_steps=200)):
        assert any(name.endswith("_spread") for name in part)
