"""The lessons' pictures are generated, small, and readable in a dark theme."""

import re
import xml.etree.ElementTree as ET

import pytest

from notebooks import lesson_pictures as pictures
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


def test_refused_request_matches_the_results():
    sentence = "needs {needed:,} slots waits: {free:,} slots are free, and the largest free piece has {largest_free:,}."
    assert sentence.format(**read()["holes"]) in PICTURES["s1_refused.svg"]
