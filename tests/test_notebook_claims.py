"""Helpers of claims.ipynb: the texts' programs, allocators, findings and errata, on a few bytes and blocks."""

import doctest
import itertools
import json
import random
import shutil
from importlib import import_module
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")

from notebooks import helpers
from notebooks.helpers.claims import (
    allocators,
    attention,
    block_pools,
    errata,
    findings,
    host_memory,
    paging,
    preemption,
    profiling,
    sections,
    sharing,
)
from stages.bench import claims, locality, results, texts
from stages.bench.engines import silent
from stages.bench.texts import cpp_engine, first_fit, memory_pool, pools
from stages.bench.texts.caching_sketch import Block, CachingAllocator, by_text
from stages.bench.texts.memory_pool import KB, MB, Slabs
from stages.s1_contiguous_cache.slot_manager import SlotManager

FOLDER = Path(helpers.__file__).parent / "claims"
MODULES = sorted(".".join(path.relative_to(FOLDER).with_suffix("").parts) for path in FOLDER.rglob("[a-z]*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    assert doctest.testmod(import_module(f"notebooks.helpers.claims.{name}")).failed == 0


# ---- slabs


def test_full_class_borrows_and_the_largest_refuses():
    allocator = Slabs(1024, ((16, 0.25), (64, 0.75)))
    assert [slab.num_blocks for slab in allocator.slabs.values()] == [16, 12]
    pieces = [allocator.allocate(10) for _ in range(17)]
    assert [size for _, size in pieces] == [16] * 16 + [64]
    allocator.release(*pieces[0])
    assert allocator.allocate(10)[1] == 16
    with pytest.raises(MemoryError, match="no block for 100 bytes"):
        allocator.allocate(100)
    with pytest.raises(ValueError, match="block 3 is not held"):
        allocator.release(3, 64)


def test_plan_of_80_gb_has_the_blocks_of_the_text():
    assert [slab.num_blocks for slab in Slabs().slabs.values()] == [32_768, 28_672, 384, 16]


def test_uniform_sizes_leave_what_the_classes_leave():
    served = allocators.serve(Slabs(), allocators.TRAFFIC["uniform up to 2 MB"], 600)
    assert served.inside == pytest.approx(0.44, abs=0.02) and served.refused == 0 and served.in_use is None
    served = allocators.serve(Slabs(), allocators.TRAFFIC["uniform up to 256 MB"], 600)
    assert 0.05 < served.refused < 0.3 and served.in_use < 0.06


# ---- a caching allocator


def test_blocks_split_and_merge():
    allocator = CachingAllocator(16 * MB)
    allocator.release(allocator.allocate(8 * MB))
    handles = [allocator.allocate(size * MB) for size in (2, 3)]
    assert allocator.snapshot() == [[(2 * MB, True), (3 * MB, True), (3 * MB, False)]]
    for handle in handles:
        allocator.release(handle)
    assert allocator.snapshot() == [[(8 * MB, False)]]


def test_empty_segments_are_collected_when_the_device_is_full():
    allocator = CachingAllocator(8 * MB)
    first, _ = allocator.allocate(2 * MB), allocator.allocate(2 * MB)
    allocator.release(first)
    allocator.allocate(6 * MB)
    assert len(allocator.segments) == 2 and allocator.reserved == 8 * MB
    with pytest.raises(MemoryError, match="2,097,152 bytes are needed, 0 are left"):
        allocator.allocate(MB)
    assert allocator.held == 8 * MB


def test_large_block_stays_whole_if_it_may_not_be_split():
    assert allocators.largest_after(None) == 598 and allocators.largest_after(512 * MB) == 600


def test_random_history_keeps_segments_whole():
    allocator, rng, handles = CachingAllocator(64 * MB), random.Random(0), list[Block]()
    for _ in range(400):
        if handles and rng.random() < 0.5:
            allocator.release(handles.pop(rng.randrange(len(handles))))
        else:
            try:
                handles.append(allocator.allocate(rng.randint(1, 8) * MB))
            except MemoryError:
                continue
        snapshot = allocator.snapshot()
        assert sum(is_held for segment in snapshot for _, is_held in segment) == len(handles)
        free = [[not is_held for _, is_held in segment] for segment in snapshot]
        assert not any(a and b for row in free for a, b in itertools.pairwise(row)), "free neighbors"
        assert allocator.held <= allocator.reserved <= 64 * MB


# ---- first fit


def test_texts_first_fit_agrees_with_stage_1():
    text, manager, rng = first_fit.FirstFit(200), SlotManager(200, "request", 1024, silent("s1")), random.Random(0)
    held = []
    for number in range(300):
        if held and rng.random() < 0.45:
            seq = held.pop(rng.randrange(len(held)))
            text.release(seq.slots.start, len(seq.slots))
            manager.free(seq)
        else:
            seq = texts.sequence("s1", str(number), [1] * rng.randint(1, 20))
            start = text.allocate(seq.max_num_tokens)
            assert (start is not None) == manager.can_allocate(seq)
            if start is not None:
                manager.allocate(seq)
                assert seq.slots.start == start
                held.append(seq)
        assert text.free == [(free.start, len(free)) for free in manager.free_ranges()]


def test_simulation_is_that_of_the_text():
    """The text's own program prints 5.1% for seed 0, and has 73 free regions."""
    operations, pool, held = first_fit.simulate(0, 1000)
    assert round(100 * operations[-1].peak, 1) == 5.1 and len(pool.free) == 73 and len(held) == 198
    assert not any(operation.is_refused for operation in operations)


@pytest.mark.full
def test_pool_that_drains_is_as_full_and_more_fragmented():
    first, fullest, last = first_fit.drained()
    assert last.full <= first.full < fullest.full and last.fragmentation > 10 * first.fragmentation


# ---- free blocks


def test_bitmap_pool_has_the_same_methods():
    pool = pools.BitmapPool(4)
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
def cases() -> dict[str, list[texts.Case]]:
    """Run all programs once, as the notebook does."""
    return texts.run_all(seconds=240)


PRINTED = [  # text, words of the question, what the program prints, what a stage prints
    ("memory_pool", "6 blocks are requested", "0", "4"),
    ("memory_pool", "grows to 33 tokens", "33; and 8 for", "3"),
    ("memory_pool", "example of a shared prompt", "42 instead of 74, 43.2% fewer", "-"),
    ("memory_pool", "requests of that example", "3->2->1; 32 blocks stay", "3->2->1->0; 0 stay"),
    ("memory_pool", "copy_on_write", "block 0, still on the free stack", "-"),
    ("memory_pool", "benchmark_allocator", "5,942: 3,995 allocations, 1,947 frees; the rate is 1.68", "-"),
    ("memory_pool", "threes at 8", "threes at 4, intact; 4 numbers copied", "-"),
    ("memory_pool", "set_allocator_settings", "AttributeError", "-"),
    ("memory_pool", "free block of 8", "2 + 6 MB", "-"),
    ("memory_pool", "2, 3 and 1 MB", "14 MB, in a segment of 6", "-"),
    ("memory_pool", "four empty segments", "2", "-"),
    ("memory_pool", "requests of 5 MB", "16.7%, in segments of 6 MB", "-"),
    ("layout", "forked once", "2 of 2", "0 of 2"),
    ("layout", "forked three times", "2 of 4", "0 of 4"),
    ("layout", "freed twice", "[0, 1, 1]", "AssertionError"),
    ("layout", "map of a GPU", "256 MB, 256 MB, 8 MB", "-"),
    ("pointer", "1,600 tokens", "100", "-"),
    ("pointer", "20 tokens is forked", "6, in 1 block", "5 and 5, in 2 blocks"),
    ("pointer", "watermark", "82", "-"),
    ("pointer", "Four beams", "3", "-"),
    ("pointer", "slices a layer", "8 of 8 (flat bytes), 0 of 8 (blocks of bytes), 0 of 4 (flat fp16)", "-"),
    ("pointer", "healthy state", "0.938, or 0.756", "-"),
    ("pointer", "A prompt of 40 tokens", "2", "3"),
    ("pointer", "arrive twice", "32", "0"),
    ("pointer", "first of three cached", "32", "-"),
    ("pointer", "first prompt returns", "32", "0"),
    ("pointer", "ends and returns", "2 of 2", "-"),
    ("pointer", "100 tokens for a pool", "0 free, 2 in the index", "-"),
    ("pointer", "older of two cached", "1, then 0", "-"),
    ("pointer", "evicted later", "2 times", "-"),
    ("pointer", "2,048 on the host", "1017/2048, then IndexError: index 2054 is out of bounds for dimension 0", "-"),
    ("pointer", "pools of other sizes", "90 of 90", "-"),
    ("pointer", "keeps its row", "1017/2048, 1024/2041, 1017/2048, 1024/2048, 7 of 7 blocks intact; no error", "-"),
    ("pointer", "gpu_utilization", "0.0", "1.0"),
    ("pointer", "host with two", "0 of 2", "-"),
    ("pointer", "one of them is offloaded", "its other owner and a new one; when the former ends, it is free", "-"),
    ("pointer", "offloaded twice", "IndexError", "-"),
    ("pointer", "which stream", "1 on the default stream, 0 there; 7 arrives", "-"),
    ("pointer", "right stream", "-1; 7 if", "-"),
    ("pointer", "Eight requests", "0, 2, 4, 6", "0, 1, 2, 3, 4, 5, 6, 7"),
    ("pointer", "Three requests", "a, c", "-"),
    ("pointer", "fits exactly", "restore a, offload a", "-"),
    ("blog", "fifth token", "IndexError", "AssertionError"),
    ("blog", "appended to a shared block", "AttributeError: 'Blocks' object has no attribute '_copy_on_write'", "-"),
    ("blog", "freed twice", "a count of -1; 1 free block", "-"),
    (
        "blog",
        "Online softmax",
        "48 tokens: under 1e-6; 38, empty slots hold old data: 0.15",
        "-",
    ),
    ("blog", "Two prompts differ", "16", "0"),
    ("blog", "three times the same", "1", "-"),
    ("blog", "40 tokens comes twice", "48", "-"),
    ("blog", "the first returns", "32", "-"),
    ("blog", "4,096 tokens", "0", "-"),
    (
        "solves",
        "Llama 7B in fp32",
        "2,048 MiB reserved, 256 MiB in blocks, 87.5% less",
        "2,048 MiB in stage 1, 256 MiB",
    ),
    ("solves", "6 blocks are requested", "4; it returns []", "4"),
    ("solves", "paged attention from torch's", "under 1e-6", "-"),
    ("solves", "one token's key", "16 KB", "-"),
    ("solves", "run the model", "256 times", "-"),
    ("solves", "prompt is empty", "18,446,744,073,709,551,615", "-"),
    ("solves", "32,768 tokens", "0", "-"),
]


@pytest.mark.parametrize(("name", "question", "text", "stage"), PRINTED)
def test_program_prints_what_the_original_prints(cases, name, question, text, stage):
    [case] = [case for case in cases[name] if question in case.question]
    assert case.text.startswith(text) and case.stages.startswith(stage)


def test_every_situation_has_words_and_a_figure(cases):
    assert len(PRINTED) == sum(map(len, cases.values()))
    assert all(case.question and case.text and case.remark for each in cases.values() for case in each)
    with pytest.raises(KeyError, match="merged"):
        texts.as_cases(texts.WORDS["caching_sketch"], {"parts": "2 + 6"})


def test_stages_column_has_only_what_a_stage_printed(cases):
    """A stage's answer differs from the text's wherever the text is at fault, and is as short as a figure."""
    answered = [case for each in cases.values() for case in each if case.stages != "-"]
    assert len(answered) > 10 and all(case.holds or case.stages != case.text for case in answered)
    assert "which stream" not in texts.table(cases["layout"]) and "| 0 of 2 |" in texts.table(cases["layout"])


def test_programs_have_a_time_limit():
    with pytest.raises(texts.subprocess.TimeoutExpired):
        texts.run("memory_pool", seconds=0.01)


@pytest.mark.full
def test_error_of_a_program_is_shown():
    with pytest.raises(RuntimeError, match="No module named"):
        texts.run("no_such_program")


# ---- errata


def test_page_of_errata_has_what_the_programs_print(cases):
    page = errata.PAGE.read_text(encoding="utf-8")
    missing = [errata.line(case) for each in cases.values() for case in each if errata.line(case) not in page]
    assert missing == [], "make claims writes book/errata.md"
    assert all(text["right"] in page for text in findings.CLAIMS["texts"].values())


@pytest.mark.full
def test_page_of_errata_is_current(cases):
    assert errata.PAGE.read_text(encoding="utf-8") == errata.page(sections.findings(), cases)


def test_what_is_right_comes_first(cases):
    page = errata.page([], cases)
    for part in page.split("\n## ")[1:]:
        assert "To correct:" in part.split("These ran as")[-1]


# ---- findings


def test_every_choice_of_victim_serves_all_requests(monkeypatch):
    monkeypatch.setenv("NOTEBOOKS_QUICK", "1")
    rows = [line.split("|") for line in preemption.compare(48, seeds=1).splitlines()[2:]]
    assert len(rows) == 4 and all(int(row[2]) > 0 for row in rows)


def test_only_a_lone_sequence_grows_above_95_percent():
    """Two sequences hold 19 of 20 blocks, which is 95%, and then a third holds the last one."""
    manager = preemption.PreemptsAbove95(20, 4, silent("s4"))
    two = [texts.sequence("s4", name, [1] * 4 * size) for name, size in (("a", 10), ("b", 9))]
    for seq in two:
        manager.allocate(seq)
    assert all(manager.can_append(seq) for seq in two)
    manager.allocate(texts.sequence("s4", "c", [1]))
    assert not any(manager.can_append(seq) for seq in two)
    alone, manager = texts.sequence("s4", "d", [1] * 80), preemption.PreemptsAbove95(20, 4, silent("s4"))
    manager.allocate(alone)
    assert manager.can_append(alone)


def test_table_folds_findings_after_the_third():
    several = [
        findings.Finding(n, f"claim {n}", "a text", "counted", "so", "a|b", "holds", {}) for n in (5, 1, 2, 3, 4)
    ]
    head, folded = findings.table(several).split("<details>")
    assert head.count("claim ") == 4  # the heading's "claim |", and three rows
    assert "claim 1" in head and "<summary>2 more</summary>" in folded and r"a\|b" in folded


def test_each_claim_has_its_texts_and_words():
    known, names = findings.CLAIMS["claims"], {*findings.CLAIMS["texts"]}
    assert list(known) == [str(number) for number in range(1, 35)]
    for number, claim in known.items():
        assert {*claim} - {"errata"} == {"claim", "from", "by", "tested", "found", "verdict"}, number
        assert claim["from"] and {*claim["from"], *claim.get("errata", {})} <= names, number
        kinds = {*claim["by"].replace(", and ", ", ").replace(" and ", ", ").split(", ")}
        assert kinds <= {"counted", "timed", "on a GPU", "on paper"}, number
    assert names == {*texts.PROGRAMS} == {*texts.NAMES}


def test_verdict_that_is_no_longer_true_raises():
    words = {"sizes": "", "right": 5, "models": 5, "exact": 1, "fit": 1}
    assert findings.finding(4, **words).verdict.startswith("5 of 5 sizes hold")
    with pytest.raises(AssertionError, match="the verdict on claim 4 is no longer true"):
        findings.finding(4, False, **words)


def test_profile_has_the_parts_of_a_step():
    parts, operations = profiling.profile(batch=2, steps=3)
    assert [name for name, _ in parts] == list(profiling.PARTS) and all(us > 0 for _, us in parts)
    assert dict(parts)["sample"] < dict(parts)["launch"] and "aten::mm" in {name for name, _, _ in operations}
    assert profiling.recipe().startswith("nsys profile") and "\nncu " in profiling.recipe()


def test_missing_figures_read_not_measured_yet():
    assert f"{findings.committed('claims.nothing.at_all')}" == "not measured yet"
    assert findings.in_words(findings.committed("claims.nothing.at_all"), "a", "b", "c") == "not measured yet"


def test_committed_figures_are_within_their_spread():
    figures = results.read()["claims"]
    pairs = [
        (part[name], part[f"{name}_spread"]) for part in figures.values() if isinstance(part, dict) for name in part
        if f"{name}_spread" in part
    ]  # fmt: skip
    assert len(pairs) > 40 and all(least <= value <= largest for value, (least, largest) in pairs)


# ---- a GPU's tables


@pytest.fixture
def gpus(tmp_path, monkeypatch) -> Path:
    """Return a folder that has the H100's results, and may get others."""
    shutil.copytree(findings.GPUS / "h100", tmp_path / "h100")
    monkeypatch.setattr(findings, "GPUS", tmp_path)
    return tmp_path


def put(folder: Path, part: int, tables: dict[str, findings.Rows], measured: str = "2030-01-01T00:00:00Z") -> None:
    """Write the results of a part on another GPU."""
    folder.mkdir(exist_ok=True)
    results = {"title": "t", "machine": "Fast GPU, torch 3", "measured": measured, "notes": [], "tables": tables}
    (folder / f"part{part}.json").write_text(json.dumps(results))


COPIES = {
    **{
        f"to_{way}_{kind}_bytes_per_second": speed for way in ("device", "host") for kind, speed in (("pinned", 100e9),)
    },
    **{f"to_{way}_pageable_bytes_per_second": 40e9 for way in ("device", "host")},
    "pageable_over_pinned": 2.5,
}
DEVICE = {"The device": {"device": {"copy GB/s, read and written": 8000.0}}, "Pinned memory": {"1 GB": COPIES}}


def test_a_new_run_changes_what_is_said_of_a_gpu(gpus):
    """Claims 13, 16 and 17 name the machine, and follow the newest table."""
    before = sharing.finding_13(), host_memory.finding_16(), host_memory.finding_17()
    assert all("H100" in found.found for found in before) and "3.5 us" in before[0].found
    assert "24.5 ms and 42 times, 21 with the store" in before[1].verdict and "5.63" in before[2].found
    assert "3.46 times back" in before[2].found and "is near on NVIDIA H100" in before[2].verdict
    put(gpus / "new", 0, DEVICE)
    copying, swapping, pinned = sharing.finding_13(), host_memory.finding_16(), host_memory.finding_17()
    assert "1.3 us at the 8,000 GB/s at which Fast GPU copies" in copying.found
    assert "Fast GPU copies 100.0 GB/s, which makes 13.4 ms and 76 times, 38 with the store" in swapping.verdict
    assert "holds on Fast GPU" in pinned.verdict and "2.50 times back" in pinned.found


def test_roofline_follows_the_newest_steps(gpus):
    assert "7B 83%, 77%; 1.1B 54%, 47%" in attention.finding_19().verdict
    rows = {f"{name}: share of the floor": {"nanovllm": 0.9} for name in ("1 sequence", "8 sequences")}
    put(gpus / "new", 6, {"race --shape llama-2-7b": rows, "race --shape tinyllama-1.1b": rows})
    assert "Fast GPU, share of the time" in (verdict := attention.finding_19().verdict) and "7B 90%, 90%" in verdict


def test_cells_of_a_gpu_are_empty_until_it_has_run(gpus):
    """Claims 5, 10, 24, 27 and 28 have tables that no committed run has."""
    empty = block_pools.finding_5(), paging.finding_10(), allocators.finding_24(), paging.finding_28()
    assert all("not measured (make gpu PART=" in found.found for found in empty)
    assert "By batch: not measured" in paging.finding_27().found
    loops = {"slab": 9e5, "caching": 3e5, "device's own": 3e3}
    rows = {name: {"operations/s": speed} for name, speed in loops.items()}
    rows["caching"]["empty share"] = 0.125
    counted = {"8 x 8,192": {"L2 hits": 12.0, paging.MEMORY: 91.0}}
    put(gpus / "new", 5, {"Claim 5: the text's loop": rows, "Claim 28: counters": counted})
    put(
        gpus / "new",
        2,
        {"A decode step": {"1B, context 1024, batch 8": {"s1 tokens/s": 1500.0, "s3 tokens/s": 1400.0}}},
    )
    put(gpus / "new", 7, {"latency by batch": {"batch 8": {"p99 ms": 31}}})
    assert "3.0 and 300 times as fast as the others on Fast GPU" in block_pools.finding_5().verdict
    assert "batch 8: 1,500 in one piece, 1,400 in blocks" in paging.finding_10().found
    assert "12.5% on Fast GPU" in allocators.finding_24().found
    assert "Fast GPU: L2 hits 12%, 91% of the memory's bandwidth" in paging.finding_28().found
    assert "batch 8" in paging.finding_27().found and "31" in paging.finding_27().found


def test_older_and_failed_rows_are_passed_over(gpus):
    put(gpus / "a", 0, DEVICE, "2020-01-01")
    put(gpus / "b", 0, {"The device": {"device": {"failed": "no time left"}}}, "2031-01-01")
    assert findings.on_gpu(0, "The device").machine == "Fast GPU", "a date is newer than none"
    assert findings.on_gpu(0, "No such table") is None and findings.on_gpu(42, "The device") is None


# ---- the bench


def test_disk_is_written_and_read(tmp_path):
    assert {"write_ms", "cold_read_ms", "warm_read_ms"} <= locality.disk(rounds=1, num_blocks=1, folder=tmp_path).keys()


def test_reads_are_compared_in_both_orders():
    figures = locality.reads(rounds=1, num_bytes=2**20, most=64)
    assert {str(piece) for piece in locality.PIECES} <= figures.keys()


@pytest.mark.full
@pytest.mark.skipif(not locality.has_kernels(), reason="needs Linux and numba")
def test_compiled_loop_attends_through_the_block_table():
    torch.manual_seed(0)
    q, k, v, table = torch.randn(2, 128), torch.randn(48, 2, 128), torch.randn(48, 2, 128), torch.tensor([2, 0, 1])
    out = torch.empty(2, 128)
    cpp_engine.attend(q.numpy(), k.numpy(), v.numpy(), table.numpy(), 16, out.numpy(), 48)
    in_order = [16 * block + slot for block in table.tolist() for slot in range(16)]
    scores = torch.einsum("hd,thd->ht", q, k[in_order]) / 128**0.5
    torch.testing.assert_close(out, torch.einsum("ht,thd->hd", scores.softmax(-1), v[in_order]))
    links = torch.tensor([[2, 0], [0, 0], [1, 0]]).numpy()
    assert [locality.follow(links, count) for count in (1, 2, 3)] == [2, 1, 0]
    layer, chain = locality.layer(rounds=1, num_tokens=64, heads=2), locality.chain(1, num_bytes=2**16, count=64)
    assert {"2 MB_16_ms", "4 KB_in_order_ms"} <= layer.keys() and layer["4 KB_huge_kb"] == 0
    assert {"2 MB_ns", "4 KB_ns"} <= chain.keys()


def test_benchmark_of_the_text_has_nothing_random():
    steps = list(memory_pool.benchmark_steps(400))
    assert steps[:100] == [None] * 100 and steps == list(memory_pool.benchmark_steps(400))
    assert allocators.peak_empty(steps, 5 * MB, by_text) > 1 / 6 > allocators.peak_empty(steps, 4 * MB, by_text)


def test_pieces_behind_a_hole_are_copied():
    pieces = {i: (4 * i, 4, torch.full((4,), float(i))) for i in (0, 2, 3)}
    moved, copied = memory_pool.compact(pieces)
    assert copied == 2 * 16 and [moved[i][0] for i in (0, 2, 3)] == [0, 4, 8]
    assert moved[0][2] is pieces[0][2] and moved[3][2] is not pieces[3][2] and bool((moved[3][2] == 3).all())


@pytest.mark.full
def test_timed_parts_have_spreads():
    parts = claims.fork(rounds=2), claims.books(rounds=2, times=10), claims.own(rounds=2, times=5)
    for part in (*parts, claims.defragment(rounds=2, count=4), claims.singly(rounds=2, num_tokens=16)):
        assert any(name.endswith("_spread") for name in part)


def test_sizes_in_words():
    assert allocators.in_words(512 * KB) == "512 KB"
