"""The page that plays the pool, without a browser: its data are what the stages do, and every moment is in them."""

import ast
import doctest
import json
import re
from importlib import import_module

import pytest

from nanovllm.trace import states
from notebooks.page.build import PAGE, SOURCE, STAGES, data, page
from notebooks.page.compact import Packer, unpack
from notebooks.page.excerpts import excerpts, functions
from notebooks.page.moments import FINDERS, moments
from notebooks.page.record import Run, record
from notebooks.page.workload import MAX_STEPS, NUM_BLOCKS, WORKLOAD
from stages.bench.engines import PACKAGES
from tests.helpers import ROOT, full

MOST_BYTES = 1_500_000
RENEW = "run make page"


@pytest.fixture(scope="module")
def html():
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def slot(html):
    """What the committed page holds."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html)[1])


@pytest.fixture(scope="module")
def runs(slot):
    """The recorded runs in it, by stage."""
    events = {each["name"]: unpack(slot["kinds"], slot["strings"], each["events"]) for each in slot["runs"]}
    return {each["name"]: Run([each["snapshot"], *events[each["name"]]]) for each in slot["runs"]}


def without_nones(event):
    return {key: value for key, value in event.items() if value is not None}


# The committed page is current


@pytest.mark.parametrize("stage", [*map(full, ["s1", "s2", "s3", "s4", "s5"]), "s6", full("s7")])
def test_a_stage_does_what_the_page_says(stage, runs):
    recorded = json.loads(json.dumps(record(stage)))
    assert list(map(without_nones, recorded)) == list(map(without_nones, runs[stage].events)), RENEW


def test_the_page_is_made_of_its_sources(html, slot):
    assert html == page(slot), RENEW


@pytest.mark.full
def test_the_page_is_the_same_bytes_again(html):
    assert page(data({name: record(name) for name in STAGES})) == html, RENEW


def test_the_code_that_it_shows_is_the_stages(slot):
    for run in slot["runs"]:
        folder, names = ROOT / "stages" / PACKAGES[run["name"]], set(run["sources"])
        assert excerpts(folder, names) == run["sources"], RENEW


def test_it_is_one_small_file_that_asks_nothing_of_the_network(html):
    assert len(html.encode()) < MOST_BYTES
    assert not re.search(r'(src|href)="(?!data:,")', html.partition('id="data"')[0])
    assert "http://www.w3.org/2000/svg" in html and len(re.findall(r"https?://", html)) == 1  # the name of a format


def test_the_package_carries_what_index_html_names():
    named = re.findall(r'(?:src|href)="([\w.]+)"', (SOURCE / "index.html").read_text(encoding="utf-8"))
    assert {*named, "index.html"} == {path.name for path in SOURCE.iterdir()}
    assert "page/*" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


# What is recorded


def test_the_compact_form_loses_nothing(runs):
    packer = Packer()
    events = runs["s7"].events[1:]
    rows = packer.pack(events)
    assert list(unpack(packer.kinds, packer.strings, rows)) == events


def test_every_stage_serves_the_same_texts_in_few_steps(runs):
    """Of what is greedy and not aborted; a sample's noise depends on its number, which stages 1 to 4 do not know."""
    texts = {}
    for name, run in runs.items():
        assert len(run.steps) <= MAX_STEPS
        assert run.events[0]["pool"]["num_blocks"] * run.events[0]["pool"]["block_size"] == 8 * NUM_BLOCKS
        for request in WORKLOAD:
            if request.n == 1 and request.aborted_after is None:
                tokens = [event for event in run.events if event["kind"] == "token"]
                said = [event["text"] for event in tokens if event["seq"] == request.name]
                assert texts.setdefault(request.name, said) == said, f"{name}: {request.name}"
    assert len(texts) == 6


def test_the_workload_is_what_it_should_be(runs):
    prompts = {event["seq"]: event["tokens"] for event in runs["s6"].events if event["kind"] == "arrive"}
    alike = [a == b for a, b in zip(prompts["A"], prompts["G"], strict=False)].index(False)
    assert alike > 16, "two requests begin with the same blocks"
    assert len(WORKLOAD) == 8 and sorted(request.n for request in WORKLOAD)[-2:] == [1, 3]
    assert [event["request"] for event in runs["s7"].events if event["kind"] == "abort"] == ["H"]
    assert len({request.after for request in WORKLOAD}) > 3


def test_all_blocks_are_given_back(runs):
    for name, run in runs.items():
        *_, last = states(run.events)
        assert not last.sequences and not last.running and not last.waiting
        assert name == "s1" or len(last.free) == NUM_BLOCKS


# Moments


@pytest.mark.parametrize("stage", STAGES)
def test_every_moment_is_found_where_its_stage_has_it(stage, runs, slot):
    [committed] = [run["moments"] for run in slot["runs"] if run["name"] == stage]
    found = json.loads(json.dumps(moments(stage, runs[stage])))
    assert found == committed, RENEW
    assert len(found) == sum(each.stage == stage for each in FINDERS) > 0


def test_a_moment_that_is_gone_is_missed(runs):
    with pytest.raises(ValueError, match="s5: no step has the moment counts_and_copies"):
        moments("s5", Run([event for event in runs["s5"].events if event["kind"] != "copied"]))


def test_either_answer_may_be_the_right_one(slot):
    """A reader who always takes the same one learns nothing."""
    right = [moment["right"] for run in slot["runs"] for moment in run["moments"]]
    assert 0.3 < sum(right) / len(right) < 0.7
    for run in slot["runs"]:
        for moment in run["moments"]:
            assert len(set(moment["answers"])) == 2 and moment["step"] > 0


def test_a_moment_counts_as_the_trace_does(runs, slot):
    """The tokens of a step are all told, and the free blocks that the reader sees before it are all accounted for."""
    told = {moment["title"]: moment for run in slot["runs"] for moment in run["moments"]}
    chunks = runs["s4"].steps[told["A long prompt among decodes"]["step"] - 1].of("chunk")
    reveal = told["A long prompt among decodes"]["reveal"]
    numbers = [int(number) for number in re.findall(r"(?:computes |and )(\d+)", reveal)]
    assert sorted(numbers) == sorted(e["end"] - e["start"] for e in chunks if e["why"] == "prefill")
    assert "E takes the last free block, and F2 needs one" in told["Blocks run out"]["sentence"]
    preempting = runs["s4"].steps[told["Blocks run out"]["step"] - 1]
    assert len(preempting.before.free) == 1 and preempting.of("taken")[0]["seq"] == "E"
    evicting = runs["s6"].steps[told["Which text goes first"]["step"] - 1]
    empty = [block for block in evicting.before.free if block not in evicting.before.cached]
    assert [event["block"] for event in evicting.of("taken", seq="C")] == empty
    assert told["Which text goes first"]["sentence"].startswith("C takes the last empty block, and G needs one")


# Its parts


def test_a_name_without_source_is_an_error():
    with pytest.raises(ValueError, match=r"s2_block_manager has no BlockPool\.touch"):
        excerpts(ROOT / "stages" / "s2_block_manager", {"BlockPool.touch", "BlockPool.get_new_blocks"})


def test_a_method_is_found_by_its_class():
    tree = ast.parse("def f(): ...\nclass A:\n    def f(self): ...\n")
    assert [name for name, _ in functions(tree)] == ["f", "A.f"]


@pytest.mark.parametrize("name", ["record", "excerpts", "moments.finding"])
def test_examples_in_docstrings(name):
    assert doctest.testmod(import_module(f"notebooks.page.{name}")).failed == 0
