"""Make the page: one file that asks nothing of the network, from page/ of the package and the runs of all stages."""

import json
import re
from pathlib import Path
from typing import Any

from notebooks.page.compact import Packer
from notebooks.page.excerpts import excerpts
from notebooks.page.moments import moments
from notebooks.page.readme import PICTURE, picture
from notebooks.page.record import Event, Run, record
from notebooks.page.workload import ROOT
from stages.bench.engines import PACKAGES

SOURCE = ROOT / "nanovllm" / "server" / "page"
PAGE = ROOT / "notebooks" / "pool.html"
LEAD = (
    "A server keeps the keys and values of every token it has read; a slot of memory holds one token's. Here are "
    "320 slots, eight requests that share them, A to H, and seven ways to serve the eight. F asks for three texts. "
    "Stages 1 to 3 get all requests at once; from stage 4 on F, G and H arrive while others run."
)
STAGES = {
    "s1": ("One piece", "Each sequence reserves one piece of the pool for its whole life."),
    "s2": ("Blocks", "The pool is cut into blocks of 8 slots. A sequence takes one when its last is full."),
    "s3": ("Paged attention", "The pool does the same. Attention now reads the blocks where they lie, without a copy."),
    "s4": ("Scheduler", "Each step admits who fits, cuts long prompts in chunks, and preempts if blocks run out."),
    "s5": ("Copy-on-write", "Samples of one prompt share its blocks, until one of them writes."),
    "s6": ("Prefix cache", "A full block keeps its text when it is free. A text that begins alike finds it there."),
    "s7": ("Offload", "A text that must leave its block goes to the host's memory, and is loaded back if found."),
}


def data(recorded: dict[str, list[Event]]) -> dict[str, Any]:
    """What the page's slot holds."""
    packer = Packer()
    runs = [run(name, events, packer) for name, events in recorded.items()]
    return {"lead": LEAD, "runs": runs, "kinds": packer.kinds, "strings": packer.strings}


def run(name: str, events: list[Event], packer: Packer) -> dict[str, Any]:
    title, idea = STAGES[name]
    snapshot, *rest = events
    sources = excerpts(ROOT / "stages" / PACKAGES[name], {event["by"] for event in rest if event.get("by")})
    return {
        "name": name, "title": title, "idea": idea, "moments": moments(name, Run(events)), "sources": sources,
        "snapshot": snapshot, "events": packer.pack(rest),
    }  # fmt: skip


def page(slot: dict[str, Any]) -> str:
    """index.html with its style, its scripts and its data inside."""
    html = (SOURCE / "index.html").read_text(encoding="utf-8")
    html = re.sub(r'<link rel="stylesheet" href="(.+?)">', lambda link: f"<style>\n{read(link[1])}</style>", html)
    html = re.sub(r'<script src="(.+?)"></script>', lambda link: f"<script>\n{read(link[1])}</script>", html)
    packed = json.dumps(slot, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    empty = '<script type="application/json" id="data">'
    assert empty + "</script>" in html, "index.html has no slot for data"
    return html.replace(empty, empty + packed)


def read(name: str) -> str:
    return (SOURCE / name).read_text(encoding="utf-8")


def build(folder: Path = PAGE.parent) -> list[Path]:
    """Write the page, and README.md's picture of the same runs. Returns the two files."""
    recorded = {name: record(name) for name in STAGES}
    made = {PAGE.name: page(data(recorded)), PICTURE.name: picture(recorded)}
    for name, text in made.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in made]
