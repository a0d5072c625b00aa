"""The pictures of README.md: the animation is small, and still for readers who prefer no motion; bars are to scale."""

import re
from xml.etree import ElementTree

import pytest

from notebooks.page.animation import PICTURE, Panel, animate, picture
from notebooks.page.record import WORKLOAD, record
from stages.tools.prose import peers

SVG = "{http://www.w3.org/2000/svg}"


def test_picture_is_small_and_has_a_background_and_a_still():
    text = PICTURE.read_text(encoding="utf-8")
    assert len(text.encode()) < 200_000
    assert "prefers-reduced-motion:reduce" in text and "<script" not in text
    background = ElementTree.fromstring(text).find(f"{SVG}rect")
    assert background.get("fill") == "#ffffff" and background.get("x") is None, "text needs a light background"


def test_captions_count_requests_and_not_their_samples():
    captions = re.findall(r">(\d) running, (\d) waiting", PICTURE.read_text(encoding="utf-8"))
    assert len(captions) > 10 and max(int(running) + int(waiting) for running, waiting in captions) <= len(WORKLOAD)


@pytest.mark.full
def test_picture_is_current():
    assert picture({name: record(name) for name in ("s1", "s6")}) == PICTURE.read_text(encoding="utf-8"), "make page"


def test_slots_change_color_at_each_step_and_the_still_shows_one_step():
    panel = Panel("a pool", 1, [["#aaa", "#fff"], ["#bbb", "#fff"], ["#aaa", "#fff"]], ["one", "two", "one"])
    text = animate([panel], still=1, seconds=3, label="two < three")
    slots = [rect for rect in ElementTree.fromstring(text).iter(f"{SVG}rect") if rect.get("width") == "4"]
    assert [slot.get("fill") for slot in slots] == ["#bbb", "#fff"]
    name = re.search(r"animation-name:(\w+)", slots[0].get("style"))[1]
    assert f"@keyframes {name}{{0%{{fill:#aaa}}33.33%{{fill:#bbb}}66.67%{{fill:#aaa}}}}" in text
    assert slots[1].get("style") is None, "it never changes"
    captions = {each.text: each.get("opacity") for each in ElementTree.fromstring(text).iter(f"{SVG}text")}
    assert captions == {"a pool": None, "one": "0", "two": "1"} and "<title>two &lt; three</title>" in text


def test_bars_of_the_peers_are_to_scale():
    """tests/test_prose.py compares the file with its report."""
    column = "mixed: tokens per second"
    speeds = {"nanovllm": [50.0, 40.0, 100.0], "llama.cpp Q8_0": [25.0, 25.0, 25.0]}
    measured = {
        name: {column: dict(zip(("median", "least", "largest"), each, strict=True))} for name, each in speeds.items()
    }
    machine = {"nanovllm": "1", "dtype": "bfloat16", "threads": 2, "device": "cpu", "torch": "2"}
    report = {"model": "x < y", "measured": measured, "machine": machine}
    text = peers.picture([report, report])
    widths = [float(bar.get("width")) for bar in ElementTree.fromstring(text).iter(f"{SVG}rect")]
    room = (peers.WIDTH - peers.LEFT - peers.GAP) / 2 - peers.RIGHT
    assert widths == pytest.approx([room / 2, room / 4] * 2, abs=0.1), "the longest spread fills the room"
    assert "prefers-color-scheme:dark" in text and "x &lt; y" in text and "llama.cpp Q8_0" in text
    assert "| llama.cpp Q8_0 | 25 (25 to 25) |" in peers.table_of(report)
