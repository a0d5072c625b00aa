"""The lessons' pictures are generated, small, and readable in a dark theme."""

import re
import xml.etree.ElementTree as ET
from itertools import combinations, pairwise

import pytest

from notebooks import lesson_pictures as pictures
from stages.bench.kernel import MIXED
from stages.bench.predict.s3 import slots_read
from stages.bench.results import read
from stages.more_beams import BeamSearchParams
from stages.tools.prose.two_ranks import storyteller

PICTURES = pictures.pictures()


def test_folder_holds_exactly_the_generated_pictures():
    assert {path.name for path in pictures.FOLDER.iterdir()} == {*PICTURES}


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_current(name):
    assert (pictures.FOLDER / name).read_text(encoding="utf-8") == PICTURES[name], "python -m notebooks.lesson_pictures"
    assert len(PICTURES[name]) < 20_000 and "prefers-color-scheme:dark" in PICTURES[name]
    assert ET.fromstring(PICTURES[name]).find("{http://www.w3.org/2000/svg}title").text


def test_guesses_are_drawn_to_scale():
    """Bars and lines have one scale: a text is above the bar exactly if it brings more than a step costs."""
    drafts = read()["drafts"]
    picture = PICTURES["more_speculation.svg"]
    bars = [float(y) for y in re.findall(r'<rect x="[^"]+" y="([^"]+)" width="60"', picture)]
    lines = [float(y) for y in re.findall(r'<path d="M12 ([\d.]+)H500" class="limit"', picture)]
    costs = [drafts["batches"]["storyteller"][batch]["cost"] for batch in ("1", "4", "16", "32")]
    tokens = [drafts["texts"][name]["tokens_a_step"] for name in ("again", "greedy", "sampled")]
    assert [[line < bar for bar in bars] for line in lines] == [[each > cost for cost in costs] for each in tokens]


def test_what_attention_reads_is_drawn_to_scale():
    """The bars of tiles are as long as what tiles copy, three times, and the kernel's as what it reads, once."""
    counts = slots_read(MIXED)
    bars = re.findall(
        r'<rect x="[^"]+" y="[^"]+" width="([^"]+)" height="22" class="(\w+)"', PICTURES["more_kernel.svg"]
    )
    copied, read = (sum(float(width) for width, kind in bars if kind == each) for each in ("hot", "used"))
    assert copied / read == pytest.approx(3 * counts["slots"] / counts["tokens"], rel=0.02)
    for number in counts.values():
        assert f"{number:,} slots" in PICTURES["more_kernel.svg"]


def test_watching_changes_no_beam_and_counts_match_the_tables():
    steps, llm = pictures.watch_beams(3, pictures.BEGINNING, 8)
    copied = llm.kv_cache.num_blocks_copied
    [alone] = llm.beam_search([pictures.BEGINNING], BeamSearchParams(3, 8, ignore_eos=True))
    assert 2 * copied == llm.kv_cache.num_blocks_copied == 2 * sum(beam.is_copied for beams in steps for beam in beams)
    assert [len(beams) for beams in steps] == [1] + [3] * 7
    num_prompt_tokens = len(alone.prompt_token_ids)
    assert {beam.token_ids[num_prompt_tokens:] for beam in steps[-1]} >= {
        tuple(each.token_ids[:-1]) for each in alone.outputs
    }
    for before, beams in pairwise(steps):
        parents = {beam.token_ids: beam.table for beam in before}
        for beam in beams:
            table, parent = beam.table, parents[beam.token_ids[:-1]]
            shared = [block for block in table if block in parent]
            assert shared == list(table[: len(shared)]) and len(shared) >= len(table) - 1


def test_each_child_has_an_arrow_and_shared_blocks_are_shaded():
    picture = PICTURES["more_beams.svg"]
    assert picture.count('class="arrow"') == (pictures.NUM_STEPS - 1) * pictures.WIDTH_OF_SEARCH
    assert picture.count('class="held"') > picture.count("×3<") > 0
    assert picture.count('class="free"') > 1, "a copy, and its key"


def test_waits_are_drawn_to_scale():
    """A point is further right for a longer wait of the prompt, and higher for a longer one of the others."""
    engines = read()["two_engines"]["engines"]
    points = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', PICTURES["more_two_engines.svg"])
    assert len(points) == len(engines) == 5
    by_place = [(float(x), -float(y)) for x, y in points]
    by_wait = [(row["ttft_ms"], row["itl_p95_ms"]) for row in engines.values()]
    for axis in range(2):
        order = sorted(range(5), key=lambda number: by_wait[number][axis])
        assert order == sorted(range(5), key=lambda number: by_place[number][axis])


def test_refused_request_matches_the_results():
    sentence = "needs {needed:,} slots waits: {free:,} slots are free, and the largest free piece has {largest_free:,}."
    assert sentence.format(**read()["holes"]) in PICTURES["s1_refused.svg"]


def test_two_ranks_are_drawn_to_scale():
    """Each rank has half of a layer's weights, and half of a block. Their pieces don't overlap."""
    found = re.findall(
        r'<rect x="(.+?)" y="(.+?)" width="(.+?)" height="(.+?)" class="(\w+)"', PICTURES["more_two_ranks.svg"]
    )
    boxes = [(*map(float, box), kind) for *box, kind in found]
    areas = {
        (part, kind): sum(width * height for _, y, width, height, each in boxes if each == kind and low <= y < high)
        for part, low, high in (("layer", 0, 190), ("block", 290, 330))
        for kind in ("used", "free")
    }
    shape = storyteller()
    num_weights = shape.divided / shape.itemsize / shape.num_hidden_layers
    for kind in ("used", "free"):
        assert areas["layer", kind] == pytest.approx(pictures.SMALL**2 * num_weights / 2, rel=0.01)
        assert areas["block", kind] == pytest.approx(pictures.LARGE**2 * 16 * shape.kv_size, rel=0.01)
    ranks = [box for box in boxes if box[4] != "held" and box[1] < 340]
    assert not any(overlap(a, b) for a, b in combinations(ranks, 2))


def overlap(a, b):
    """Return whether two boxes share more than the rounding of their edges."""
    return all(min(a[i] + a[i + 2], b[i] + b[i + 2]) - max(a[i], b[i]) > 0.2 for i in range(2))
