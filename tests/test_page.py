"""The page that plays back the pool, without a browser: its data is current, and every moment is in it."""

import ast
import doctest
import json
import re
from importlib import import_module

import pytest

import stages.s3_paged_attention
from nanovllm.trace import Tracer, states
from notebooks.page.build import (
    PAGE,
    SOURCE,
    STAGES,
    Packer,
    data,
    excerpts,
    functions,
    modules,
    page,
    unpack,
)
from notebooks.page.moments import FINDERS, moments
from notebooks.page.record import BLOCK_SIZE, MAX_STEPS, NUM_BLOCKS, TILE_SIZE, WORKLOAD, Run, record, serve
from stages.bench.engines import PACKAGES
from stages.s3_paged_attention.kv_cache import KVCache
from tests.helpers import ROOT, full

MAX_BYTES = 1_500_000
REBUILD = "run make page"


@pytest.fixture(scope="module")
def html():
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def content(html):
    """Return the data of the committed page."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html)[1])


@pytest.fixture(scope="module")
def runs(content):
    """Return the committed runs, by stage."""
    events = {run["name"]: unpack(content["kinds"], content["strings"], run["events"]) for run in content["runs"]}
    return {run["name"]: Run([run["snapshot"], *events[run["name"]]]) for run in content["runs"]}


def without_nones(event):
    return {key: value for key, value in event.items() if value is not None}


# The committed page is current


@pytest.mark.parametrize("stage", [*map(full, ["s1", "s2", "s3", "s4", "s5"]), "s6", full("s7")])
def test_committed_events_are_current(stage, runs):
    recorded = json.loads(json.dumps(record(stage)))
    assert list(map(without_nones, recorded)) == list(map(without_nones, runs[stage].events)), REBUILD


def test_committed_page_matches_its_sources(html, content):
    assert html == page(content), REBUILD


@pytest.mark.full
def test_rebuilding_gives_the_same_bytes(html):
    assert page(data({name: record(name) for name in STAGES})) == html, REBUILD


def test_code_on_the_page_is_current(content):
    for run in content["runs"]:
        folder, names = ROOT / "stages" / PACKAGES[run["name"]], set(run["sources"])
        assert excerpts(folder, names) == run["sources"], REBUILD


def test_page_is_one_small_file_that_needs_no_network(html):
    assert len(html.encode()) < MAX_BYTES
    assert not re.search(r'(src|href)="(?!data:,")', html.partition('id="data"')[0])
    assert "http://www.w3.org/2000/svg" in html and len(re.findall(r"https?://", html)) == 1  # the name of a format


def test_folder_holds_exactly_the_files_that_the_page_loads(html):
    """chat.js is loaded by a server's page, and is no part of this one."""
    named = re.findall(r'(?:src|href)="([\w.]+)"', (SOURCE / "index.html").read_text(encoding="utf-8"))
    loaded_later = re.findall(r'import\("./([\w.]+)"\)', html)
    assert loaded_later == ["chat.js"] and "class Turn" not in html
    assert {*named, *modules(), *loaded_later, "index.html"} == {path.name for path in SOURCE.iterdir()}
    assert "page/*" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


# The recorded runs


def test_packing_loses_nothing(runs):
    packer = Packer()
    events = runs["s7"].events[1:]
    rows = packer.pack(events)
    assert list(unpack(packer.kinds, packer.strings, rows)) == events


def test_all_stages_generate_the_same_texts_in_few_steps(runs):
    """Compare greedy requests that run to their end. Samples differ: stages 1 to 4 do not know their index."""
    texts = {}
    for name, run in runs.items():
        assert len(run.steps) <= MAX_STEPS
        assert run.events[0]["pool"]["num_blocks"] * run.events[0]["pool"]["block_size"] == 8 * NUM_BLOCKS
        for request in WORKLOAD:
            if request.n == 1 and request.aborted_after is None:
                tokens = [event for event in run.events if event["kind"] == "token"]
                text = [event["text"] for event in tokens if event["seq"] == request.name]
                assert texts.setdefault(request.name, text) == text, f"{name}: {request.name}"
    assert len(texts) == 6


def test_workload_covers_sharing_sampling_and_aborts(runs):
    prompts = {event["seq"]: event["tokens"] for event in runs["s6"].events if event["kind"] == "arrive"}
    is_same = [a == b for a, b in zip(prompts["A"], prompts["G"], strict=False)]
    assert is_same.index(False) > 16, "two requests must begin with the same blocks"
    assert len(WORKLOAD) == 8 and sorted(request.n for request in WORKLOAD)[-2:] == [1, 3]
    assert [event["request"] for event in runs["s7"].events if event["kind"] == "abort"] == ["H"]
    assert len({request.after for request in WORKLOAD}) > 3


def test_all_blocks_are_free_at_the_end(runs):
    for name, run in runs.items():
        *_, last = states(run.events)
        assert not last.sequences and not last.running and not last.waiting
        assert name == "s1" or len(last.free) == NUM_BLOCKS


# Moments


@pytest.mark.parametrize("stage", STAGES)
def test_committed_moments_are_current(stage, runs, content):
    [committed] = [run["moments"] for run in content["runs"] if run["name"] == stage]
    assert json.loads(json.dumps(moments(stage, runs[stage]))) == committed, REBUILD
    assert len(committed) == len(FINDERS[stage]) > 0


def test_missing_moment_is_an_error(runs):
    with pytest.raises(ValueError, match="s5: no step has the moment counts_and_copies"):
        moments("s5", Run([event for event in runs["s5"].events if event["kind"] != "copied"]))


def test_lessons_name_the_moments_of_their_stages(content):
    for run in content["runs"]:
        lesson = " ".join((ROOT / "stages" / PACKAGES[run["name"]] / "README.md").read_text(encoding="utf-8").split())
        assert [each["title"] for each in run["moments"] if each["title"] not in lesson] == []


def test_either_answer_can_be_right(content):
    """A reader who always picks the same answer should learn nothing."""
    right = [moment["right"] for run in content["runs"] for moment in run["moments"]]
    assert 0.3 < sum(right) / len(right) < 0.7
    for run in content["runs"]:
        for moment in run["moments"]:
            assert len(set(moment["answers"])) == 2 and moment["step"] > 0


def test_numbers_in_moments_match_the_events(runs, content):
    """A moment accounts for all tokens of its step, and for all free blocks that the reader sees before it."""
    by_title = {moment["title"]: moment for run in content["runs"] for moment in run["moments"]}
    long_prompt = by_title["A long prompt among decodes"]
    step, budget = runs["s4"].steps[long_prompt["step"] - 1], runs["s4"].events[0]["max_num_batched_tokens"]
    *others, own = [e["end"] - e["start"] for e in step.of("chunk", why="prefill")]
    said = [int(number) for number in re.findall(r"(?:computes | and [A-H] )(\d+)", long_prompt["sentence"])]
    assert said == others, "the question accounts for all that comes first"
    assert f"{budget - len(step.of('chunk', why='decode')) - sum(others)}, all that is left" in long_prompt["answers"]
    assert f"{own}, all that is left" in long_prompt["answers"]
    assert "E takes the last free block, and F2 needs one" in by_title["Blocks run out"]["sentence"]
    preempting = runs["s4"].steps[by_title["Blocks run out"]["step"] - 1]
    assert len(preempting.before.free) == 1 and preempting.of("taken")[0]["seq"] == "E"
    evicting = runs["s6"].steps[by_title["Which block goes first"]["step"] - 1]
    empty = [block for block in evicting.before.free if block not in evicting.before.cached]
    assert [event["block"] for event in evicting.of("taken", seq="C")] == empty
    assert by_title["Which block goes first"]["sentence"].startswith("C takes the last empty block, and G needs one")


@pytest.mark.full
def test_marked_tile_is_what_attention_reads_first(content, monkeypatch):
    [moment] = [each for each in content["runs"][2]["moments"] if each["title"] == "What attention copies"]
    reads, steps = [], []
    read = KVCache.read
    monkeypatch.setattr(KVCache, "read", lambda self, layer, blocks: reads.append(blocks) or read(self, layer, blocks))

    def write(event):
        if event["kind"] == "step":
            steps.append(reads.copy())
            reads.clear()

    serve("s3", stages.s3_paged_attention, write, Tracer())
    tiles = steps[moment["step"] - 1]
    assert sorted(tiles[0].flatten().tolist()) == sorted(moment["blocks"])
    assert len(tiles) > 2 and max(tile.numel() for tile in tiles) == TILE_SIZE // BLOCK_SIZE


# Excerpts


def test_excerpt_of_an_unknown_function_is_an_error():
    with pytest.raises(ValueError, match=r"s2_block_manager has no BlockPool\.touch"):
        excerpts(ROOT / "stages" / "s2_block_manager", {"BlockPool.touch", "BlockPool.get_new_blocks"})


def test_methods_are_named_after_their_class():
    tree = ast.parse("def f(): ...\nclass A:\n    def f(self): ...\n")
    assert [name for name, _ in functions(tree)] == ["f", "A.f"]


@pytest.mark.parametrize("name", ["animation", "build", "moments", "play", "record", "worker"])
def test_docstring_examples(name):
    assert doctest.testmod(import_module(f"notebooks.page.{name}")).failed == 0
