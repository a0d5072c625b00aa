"""The lessons' pictures: made by their script, small, and readable in a dark theme."""

import xml.etree.ElementTree as ET

import pytest

from stages.bench import pictures
from stages.bench.results import read

MADE = pictures.pictures()


def test_the_folder_has_what_the_script_makes():
    assert {path.name for path in pictures.FOLDER.iterdir()} == {*MADE}


@pytest.mark.parametrize("name", MADE)
def test_a_picture_is_current(name):
    assert (pictures.FOLDER / name).read_text(encoding="utf-8") == MADE[name], "python -m stages.bench.pictures"
    assert len(MADE[name]) < 20_000 and "prefers-color-scheme:dark" in MADE[name]
    assert ET.fromstring(MADE[name]).find("{http://www.w3.org/2000/svg}title").text


def test_the_refused_request_is_that_of_the_results():
    told = (
        "A request that needs {needed:,} slots waits. free: {free:,} slots. The largest free piece has {largest_free:,}"
    )
    assert told.format(**read()["holes"]) in MADE["s1_refused.svg"]
