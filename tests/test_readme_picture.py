"""The animated picture at the top of README.md: small, still for readers who prefer no motion, and current."""

import re
from xml.etree import ElementTree

import pytest

from notebooks.page.animation import PICTURE, Panel, animate, picture
from notebooks.page.record import record

SVG = "{http://www.w3.org/2000/svg}"


def test_picture_is_small_and_has_a_background_and_a_still():
    text = PICTURE.read_text(encoding="utf-8")
    assert len(text.encode()) < 200_000
    assert "prefers-reduced-motion:reduce" in text and "<script" not in text
    background = ElementTree.fromstring(text).find(f"{SVG}rect")
    assert background.get("fill") == "#ffffff" and background.get("x") is None, "text needs a light background"


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
