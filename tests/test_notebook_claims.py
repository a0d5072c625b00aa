"""Helpers of claims.ipynb: the texts' programs, allocators, and findings, on a few bytes and blocks."""

import doctest
import random
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from notebooks import helpers
from notebooks.helpers.claims import block_pools, contiguous, findings, preemption, profiling, programs, slabs
from notebooks.helpers.claims.slabs import Full, SlabAllocator
from stages.bench import claims, locality, results
from stages.bench.engines import silent
from stages.s1_contiguous_cache.slot_manager import SlotManager

FOLDER = Path(helpers.__file__).parent / "claims"
MODULES = sorted(".".join(path.relative_to(FOLDER).with_suffix("").parts) for path in FOLDER.rglob("[a-z]*.py"))


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


def test_classes_grow_by_a_factor_up_to_the_largest():
    assert slabs.factors(16) == [4 * slabs.KB, 64 * slabs.KB, slabs.MB, 16 * slabs.MB]
    assert slabs.factors(11)[-2:] == [4 * slabs.KB * 11**3, 16 * slabs.MB]


# ---- first fit


def test_fast_first_fit_agrees_with_stage_1():
    fast, manager, rng = contiguous.FirstFit(200), SlotManager(200, "request", 1024, silent("s1")), random.Random(0)
    held = []
    for number in range(300):
        if held and rng.random() < 0.45:
            seq = held.pop(rng.randrange(len(held)))
            fast.release(seq.slots.start, len(seq.slots))
            manager.free(seq)
        else:
            seq = programs.sequence("s1", str(number), [1] * rng.randint(1, 20))
            start = fast.allocate(seq.max_num_tokens)
            assert (start is not None) == manager.can_allocate(seq)
            if start is not None:
                manager.allocate(seq)
                assert seq.slots.start == start
                held.append(seq)
        assert fast.free == [(free.start, len(free)) for free in manager.free_ranges()]


def test_peak_of_fragmentation_never_falls():
    moments = contiguous.first_fit("uniform", seed=0, drains=True)
    first, second, drained = moments.values()
    assert first.peak <= second.peak <= drained.peak and second.fragmentation <= second.peak
    assert drained.full <= first.full < second.full


# ---- free blocks


def test_bitmap_pool_has_the_same_methods():
    pool = block_pools.BitmapPool(4)
    assert pool.get_new_blocks(3) == [0, 1, 2] and str(pool) == "0001"
    pool.free_blocks([1])
    assert pool.get_new_blocks(1) == [1]
    with pytest.raises(ValueError, match="2 blocks are needed, 1 are free"):
        pool.get_new_blocks(2)
    with pytest.raises(ValueError, match="block 3 is freed twice"):
        pool.free_blocks([3])


def test_list_and_bitmap_take_different_blocks():
    *_, (_, listed, mapped) = block_pools.side_by_side()
    assert listed == "[0][4][5][6][7]" and mapped == "00101111"


def test_list_and_bitmap_reuse_blocks_that_a_queue_does_not():
    shares = block_pools.recently_written(times=400)
    assert min(shares["free list"], shares["bitmap"]) > shares["queue"]


# ---- the texts' programs


@pytest.fixture(scope="module")
def cases() -> dict[str, list[programs.Case]]:
    """Run all programs once, as the notebook does."""
    return programs.run(*programs.PROGRAMS, seconds=240)


@pytest.mark.parametrize(
    ("program", "question", "text", "stage"),
    [
        ("memory_pool", "6 blocks are requested", "0", "4"),
        ("memory_pool", "grows to 33 tokens", "33", "3"),
        ("memory_pool", "sharing 500 tokens", "1->2->3->2->1; 32", "every owner"),
        ("memory_pool", "third contain", "2, and 8 more", "blocks are never moved"),
        ("memory_layout", "parent and its fork", "parent False, child False", "parent True, child False"),
        ("paged_attention", "fifth token", "IndexError", "AssertionError"),
        ("paged_attention", "Two prompts differ", "16,", "0:"),
        ("prefix_index", "A prompt of 40 tokens", "2:", "3"),
        ("prefix_index", "arrive twice", "32,", "0"),
        ("prefix_index", "first prompt returns", "32,", "0"),
        ("prefix_index", "block 1 is evicted", "none", "block 0"),
        ("pointer_level", "gpu_utilization", "0.0", "1.0"),
        ("pointer_level", "The pool is full", "IndexError: index 64", "stage 7"),
        ("pointer_level", "host with two", "1 of 2", "the oldest copy"),
        ("pointer_level", "Two sequences share", "its other owner, and a new sequence too", "its other owner alone"),
        ("pointer_level", "on which stream", "1 on the default stream, 0 on the other", "stores"),
        ("pointer_level", "right stream", "-1", "7,"),
        ("pointer_level", "Eight requests", "4:", "8"),
        ("pointer_level", "Six requests", "b:", "stage 4"),
        ("pointer_level", "10 steps", "after 140 ms", "after 100 ms"),
        ("fragmentation", "2 sequences of 256", "2 GB reserved, 256 MB in blocks", "2 GB reserved, 256 MB in blocks"),
        ("fragmentation", "Two threads", "without a lock: IndexError", "the package refuses: RuntimeError"),
    ],
)
def test_program_shows_its_fault(cases, program, question, text, stage):
    [case] = [case for case in cases[program] if question in case.question]
    assert case.text.startswith(text) and case.stage.startswith(stage)


def test_example_of_the_manager_loses_blocks(cases):
    example = cases["pointer_level"][0].text
    assert int(example.split(" of ")[0]) < 7 and "1,017 blocks are free" in example


def test_benchmark_stops_when_the_pool_is_empty(cases):
    [case] = [case for case in cases["memory_pool"] if "benchmark" in case.question]
    assert 1000 < int(case.text.split(",", 2)[0] + case.text.split(",", 2)[1]) < 10_000


def test_programs_have_a_time_limit():
    with pytest.raises(programs.subprocess.TimeoutExpired):
        programs.run("memory_pool", seconds=0.01)


@pytest.mark.full
def test_error_of_a_program_is_shown():
    with pytest.raises(RuntimeError, match="No module named"):
        programs.run("no_such_program")


# ---- findings


def test_every_choice_of_victim_serves_all_requests(monkeypatch):
    monkeypatch.setenv("NOTEBOOKS_QUICK", "1")
    rows = [line.split("|") for line in preemption.compare(48, seeds=1).splitlines()[2:]]
    assert len(rows) == 4 and all(int(row[2]) > 0 for row in rows)


def test_only_a_lone_sequence_grows_above_95_percent():
    """Two sequences hold 19 of 20 blocks, which is 95%, and then a third holds the last one."""
    manager = preemption.PreemptsAbove95(20, 4, silent("s4"))
    two = [programs.sequence("s4", name, [1] * 4 * size) for name, size in (("a", 10), ("b", 9))]
    for seq in two:
        manager.allocate(seq)
    assert all(manager.can_append(seq) for seq in two)
    manager.allocate(programs.sequence("s4", "c", [1]))
    assert not any(manager.can_append(seq) for seq in two)
    alone, manager = programs.sequence("s4", "d", [1] * 80), preemption.PreemptsAbove95(20, 4, silent("s4"))
    manager.allocate(alone)
    assert manager.can_append(alone)


def test_table_folds_findings_after_the_third():
    several = [findings.Finding(n, f"claim {n}", "a text", "so", "a|b", "holds") for n in (5, 1, 2, 3, 4)]
    head, folded = findings.table(several).split("<details>")
    assert head.count("claim ") == 4  # the heading's "claim |", and three rows
    assert "claim 1" in head and "<summary>2 more</summary>" in folded and r"a\|b" in folded


def test_each_claim_has_its_texts_and_words():
    known = findings.CLAIMS["claims"]
    assert list(known) == [str(number) for number in range(1, 23)]
    for claim in known.values():
        assert {*claim} == {"claim", "from", "tested", "found", "verdict"} and claim["from"]
        assert {*claim["from"]} <= {*findings.CLAIMS["texts"]}


def test_verdict_that_is_no_longer_true_raises():
    assert findings.finding(4, sizes="", right=5, models=5).verdict.startswith("5 of 5 hold")
    with pytest.raises(AssertionError, match="the verdict on claim 4 is no longer true"):
        findings.finding(4, False, sizes="", right=5, models=5)


def test_profile_has_the_parts_of_a_step():
    parts, operations = profiling.profile(batch=2, steps=3)
    assert [name for name, _ in parts] == list(profiling.PARTS) and all(us > 0 for _, us in parts)
    assert dict(parts)["sample"] < dict(parts)["launch"] and "aten::mm" in {name for name, _, _ in operations}
    assert profiling.recipe().startswith("nsys profile") and "\nncu " in profiling.recipe()


def test_missing_figures_read_not_measured_yet():
    assert findings.committed("claims.nothing.at_all").text() == "not measured yet"
    assert findings.in_words(findings.committed("claims.nothing.at_all"), "a", "b", "c") == "not measured yet"


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
    for part in (claims.fork(rounds=2), claims.books(rounds=2, times=10), claims.moving(rounds=2, num_steps=200)):
        assert any(name.endswith("_spread") for name in part)
