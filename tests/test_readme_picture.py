"""The pictures of README.md: the animation is small, and still for readers who prefer no motion; bars are to scale."""

import re
from itertools import chain
from xml.etree import ElementTree

import pytest

from nanovllm.trace.replay import SequenceState, State
from notebooks.page.animation import PICTURE, THEMES, Panel, animate, memory, picture
from notebooks.page.record import WORKLOAD, Step, record
from stages.tools.prose import peers

SVG = "{http://www.w3.org/2000/svg}"


def test_picture_is_small_and_has_a_background_and_a_still():
    text = PICTURE.read_text(encoding="utf-8")
    assert len(text.encode()) < 200_000
    assert "prefers-reduced-motion:reduce" in text and "<script" not in text
    background = ElementTree.fromstring(text).find(f"{SVG}rect")
    assert background.get("class") == "ground" and background.get("x") is None, "text needs a background of its theme"
    assert background.get("fill") == "#ffffff", "without CSS, too"


def test_picture_has_the_colors_of_light_and_dark_pages():
    text = PICTURE.read_text(encoding="utf-8")
    light, dark = re.findall(r"svg\{(--[^}]*)\}", text)
    assert text.index(light) < text.index("prefers-color-scheme:dark") < text.index(dark)
    for i, colors in enumerate((light, dark)):
        named = dict(each.removeprefix("--").split(":") for each in colors.split(";"))
        assert named == {name: pair[i] for name, pair in THEMES.items()}
        assert contrast(named["text"], named["ground"]) > 4.5 and contrast(named["used0"], named["ground"]) > 3
    used = {*re.findall(r"var\(--(\w+)\)", text), *re.findall(r'class="(\w+)', text)}
    assert used <= {*THEMES, "a"} and {"shared", "idle", "free", "kept0", "used7"} <= used


def contrast(one: str, other: str) -> float:
    """Return the ratio by which WCAG compares two colors."""

    def luminance(color: str) -> float:
        channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_captions_count_requests_and_not_their_samples():
    captions = re.findall(r">(\d) running, (\d) waiting", PICTURE.read_text(encoding="utf-8"))
    assert len(captions) > 10 and max(int(running) + int(waiting) for running, waiting in captions) <= len(WORKLOAD)


def test_lines_below_a_pool_count_its_holes_and_what_happened_to_its_blocks():
    held = [SequenceState(name, name, [], [], 10, slots=slots) for name, slots in (("A", (8, 20)), ("B", (60, 64)))]
    pieces = State({}, None, sequences={each.seq: each for each in held})
    assert list(memory([Step(1, [], pieces, pieces)])) == [("304 slots free, 256 in one piece",)]
    blocks = State({}, None, ref_counts=[2, 1, 0, 3])
    steps = [
        Step(number, [{"kind": kind}], blocks, blocks) for number, kind in enumerate(("copied", "evicted", "copied"))
    ]
    assert [*chain(*memory(steps))] == [
        f"2 shared, {counts}" for counts in ("1 copied, 0 evicted", "1 copied, 1 evicted", "2 copied, 1 evicted")
    ]


@pytest.mark.full
def test_picture_is_current():
    assert picture({name: record(name) for name in ("s1", "s6")}) == PICTURE.read_text(encoding="utf-8"), "make page"


def test_slots_change_color_at_each_step_and_the_still_shows_one_step():
    fills = [["used0", "free"], ["kept0", "free"], ["used0", "free"]]
    outlines = [["line", "line"], ["shared", "line"], ["line", "line"]]
    panel = Panel("a pool", 1, fills, outlines, [("one", "last"), ("two", "last"), ("one", "last")])
    text = animate([panel], still=1, seconds=3, label="two < three")
    image = ElementTree.fromstring(text)
    slots = [rect for rect in image.iter(f"{SVG}rect") if rect.get("width") == "4"]
    assert [(slot.get("fill"), slot.get("class")) for slot in slots] == [
        (THEMES["kept0"][0], "kept0 a"),
        (THEMES["free"][0], "free"),
    ]
    assert frames_of(slots[0], text) == "0%{fill:var(--used0)}33.33%{fill:var(--kept0)}66.67%{fill:var(--used0)}"
    assert slots[1].get("style") is None, "it never changes"
    borders = [rect for rect in image.iter(f"{SVG}rect") if rect.get("stroke")]
    assert [border.get("class") for border in borders] == ["shared a", "line"]
    assert "33.33%{stroke:var(--shared)}" in frames_of(borders[0], text)
    captions = {each.text: each.get("opacity") for each in image.iter(f"{SVG}text")}
    assert captions == {"a pool": None, "one": "0", "two": "1", "last": "1"}
    assert "<title>two &lt; three</title>" in text


def frames_of(shape: ElementTree.Element, text: str) -> str:
    name = re.search(r"animation-name:(\w+)", shape.get("style"))[1]
    return re.search(rf"@keyframes {name}\{{(.*)\}}$", text, re.MULTILINE)[1]


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
