"""The lessons' pictures are generated, small, and readable in a dark theme."""

import re
import xml.etree.ElementTree as ET

import pytest

from notebooks import lesson_pictures as pictures
from stages.bench.kernel import MIXED
from stages.bench.predict.s3 import slots_read
from stages.bench.results import read

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
