"""The race with other engines: README.md's picture and the docs' table, from notebooks/peers.json (`make peers`)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from stages.tools.prose.markdown import table

PICTURE, REPORT, PAGE = "peers.svg", "peers.json", "benchmarking.md"
FILE = Path(__file__).resolve().parents[3] / "notebooks" / REPORT
OWN = "nanovllm"
SPEED, FIRST_TOKEN = ": tokens per second", ": first token ms"
COLUMNS = {"1 sequence": "one sequence", "mixed": "32 requests of mixed lengths"}  # jobs in the picture
NAMES = {"vllm": "vLLM", "transformers": "transformers generate", "transformers-batch": "transformers generate_batch"}
WIDTH, LEFT, GAP, RIGHT = 780, 214, 20, 56  # of the picture, of the names, between columns, and of a column's numbers
BAR, ROW = 12, 19
STYLE = """<style>
text{font:12px system-ui,sans-serif;fill:#57606a}.title,.ours{font-weight:600;fill:#24292f}
.bar{fill:#b8c4d0}.own{fill:#4a7fb5}.spread{stroke:#24292f;stroke-width:1.5}
@media (prefers-color-scheme:dark){text{fill:#9da7b3}.title,.ours{fill:#e6edf3}
.bar{fill:#4b5763}.own{fill:#6ea3d8}.spread{stroke:#e6edf3}}
</style>"""
Report = dict[str, Any]  # of `python -m stages.bench race` with one model
Results = dict[str, Any]


class Bar(NamedTuple):
    """An engine's tokens per second: the median of its rounds, the lowest and the highest."""

    median: float
    least: float
    largest: float


def title_of(engine: str, dtype: str) -> str:
    """Return the name of an engine, with the format of its weights.

    >>> title_of("llama.cpp Q8_0", "bfloat16"), title_of("vllm", "bfloat16")
    ('llama.cpp Q8_0', 'vLLM bfloat16')
    """
    name, _, label = engine.partition(" ")
    return f"{NAMES.get(name, name)} {label or dtype}"


# ---- the picture


def picture(reports: list[Report]) -> str:
    """Return the picture as SVG, readable on light and dark pages."""
    parts, y, room = list[str](), 8, (WIDTH - LEFT - GAP) / 2 - RIGHT
    for report in reports:
        jobs = [job for job in COLUMNS if job + SPEED in report["measured"][OWN]]
        y += 22
        parts.append(f'<text x="12" y="{y}" class="title">{escape(report["model"])}</text>')
        for column, job in enumerate(jobs):
            x = LEFT + column * (room + RIGHT + GAP)
            parts.append(f'<text x="{x:g}" y="{y}">{COLUMNS[job]}</text>')
            bars = {name: Bar(**row[job + SPEED]) for name, row in report["measured"].items()}
            scale = room / max(bar.largest for bar in bars.values())
            for number, (name, bar) in enumerate(bars.items()):
                parts += draw(bar, x, y + 8 + number * ROW, scale, name.split()[0] == OWN)
        for name in report["measured"]:
            y += ROW
            label = 'class="ours"' if name.split()[0] == OWN else ""
            title = escape(title_of(name, report["machine"]["dtype"]))
            parts.append(f'<text x="{LEFT - 10}" y="{y - 1}" text-anchor="end" {label}>{title}</text>')
        y += 6
    parts.append(
        f'<text x="12" y="{y + 24}">Tokens per second; the thin line spans all rounds. {where(reports)}</text>'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 36}" width="{WIDTH}" role="img">'
    title = "<title>Tokens per second of nanovllm, vLLM, llama.cpp and transformers</title>"
    return "\n".join([head, title, STYLE, *parts, "</svg>"]) + "\n"


def draw(bar: Bar, x: float, y: float, scale: float, is_ours: bool) -> Iterator[str]:
    """Yield a bar with its spread and its number."""
    label, fill = ("ours", "own") if is_ours else ("", "bar")
    yield f'<rect x="{x:g}" y="{y}" width="{bar.median * scale:.1f}" height="{BAR}" class="{fill}"/>'
    low, high = (x + value * scale for value in (bar.least, bar.largest))
    yield f'<line x1="{low:.1f}" y1="{y + BAR / 2:g}" x2="{high:.1f}" y2="{y + BAR / 2:g}" class="spread"/>'
    yield f'<text x="{high + 6:.1f}" y="{y + BAR - 2}" class="{label}">{bar.median:.0f}</text>'


def where(reports: list[Report]) -> str:
    machine = reports[0]["machine"]
    return escape(f"{machine['threads']} threads, device {machine['device']}.")


# ---- the table


def peers_block(results: Results) -> str:
    """Return a table for each model: every engine, every job, with the least and the largest of the rounds."""
    return "\n".join(table_of(report) for report in json.loads(FILE.read_text(encoding="utf-8")))


def table_of(report: Report) -> str:
    """Return the table of a model."""
    machine, measured = report["machine"], report["measured"]
    jobs = [name for name in measured[OWN] if name.endswith((SPEED, FIRST_TOKEN))]
    heads = [name.removesuffix(SPEED).replace(FIRST_TOKEN, ": ms to its first token") for name in jobs]
    rows = [
        [title_of(name, machine["dtype"]), *(shown(row.get(job)) for job in jobs)] for name, row in measured.items()
    ]
    versions = [f"{name} {machine[name]}" for name in measured if name in machine]
    note = f"{machine['threads']} threads, device {machine['device']}, torch {machine['torch']}; {'; '.join(versions)}."
    return f"**{report['model']}**: {note}\n\n{table(['tokens per second', *heads], rows)}"


def shown(spread: dict[str, float] | None) -> str:
    """Return a median with its spread.

    >>> shown({"median": 97.2, "least": 90.4, "largest": 1234.5})
    '97 (90 to 1,234)'
    """
    if spread is None:
        return "–"
    return f"{spread['median']:,.0f} ({spread['least']:,.0f} to {spread['largest']:,.0f})"


BLOCKS = {"peers": peers_block}
