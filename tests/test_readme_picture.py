"""The picture at the top of README.md: small, still where motion is not wanted, and of the runs that the page plays."""

import re
from xml.etree import ElementTree

import pytest

from notebooks.page.animation import Panel, animate
from notebooks.page.readme import PICTURE, picture
from notebooks.page.record import record

SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_is_small_and_has_a_ground_and_a_still():
    text = PICTURE.read_text(encoding="utf-8")
    assert len(text.encode()) < 200_000
    assert "prefers-reduced-motion:reduce" in text and "<script" not in text
    ground = ElementTree.fromstring(text).find(f"{SVG}rect")
    assert ground.get("fill") == "#ffffff" and ground.get("x") is None, "on a dark page the text needs a light ground"


@pytest.mark.full
def test_the_picture_is_of_the_runs_that_the_page_plays():
    assert picture({name: record(name) for name in ("s1", "s6")}) == PICTURE.read_text(encoding="utf-8"), "make page"


def test_a_slot_has_its_colour_at_each_step_and_the_still_is_one_of_them():
    panel = Panel("a pool", 1, [["#aaa", "#fff"], ["#bbb", "#fff"], ["#aaa", "#fff"]], ["one", "two", "one"])
    text = animate([panel], still=1, seconds=3, label="two < three")
    slots = [rect for rect in ElementTree.fromstring(text).iter(f"{SVG}rect") if rect.get("width") == "4"]
    assert [slot.get("fill") for slot in slots] == ["#bbb", "#fff"]
    name = re.search(r"animation-name:(\w+)", slots[0].get("style"))[1]
    assert f"@keyframes {name}{{0%{{fill:#aaa}}33.33%{{fill:#bbb}}66.67%{{fill:#aaa}}}}" in text
    assert slots[1].get("style") is None, "it never changes"
    captions = {each.text: each.get("opacity") for each in ElementTree.fromstring(text).iter(f"{SVG}text")}
    assert captions == {"a pool": None, "one": "0", "two": "1"} and "<title>two &lt; three</title>" in text
