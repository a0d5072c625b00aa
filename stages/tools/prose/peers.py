"""The picture of speed in README.md, notebooks/peers.svg, drawn from the report of `nanovllm bench peers --json`."""

from collections.abc import Iterator
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

PICTURE, REPORT = "peers.svg", "peers.json"
OWN = "nanovllm"
SPEED = ": tokens per second"
TITLES = {"mixed": "32 requests of mixed lengths"}  # of jobs; others are named for their sequences
NAMES = {
    "vllm": "vLLM",
    "llama.cpp": "llama-cpp-python",
    "transformers": "transformers generate",
    "transformers-batch": "transformers generate_batch",
}
WIDTH, LEFT, RIGHT = 720, 210, 70  # of the picture, and of the margins for names and numbers
BAR, ROW = 16, 26
STYLE = """<style>
text{font:13px system-ui,sans-serif;fill:#57606a}.title,.ours{font-weight:600;fill:#24292f}
.bar{fill:#b8c4d0}.own{fill:#4a7fb5}.spread{stroke:#24292f;stroke-width:1.5}
@media (prefers-color-scheme:dark){text{fill:#9da7b3}.title,.ours{fill:#e6edf3}
.bar{fill:#4b5763}.own{fill:#6ea3d8}.spread{stroke:#e6edf3}}
</style>"""


class Bar(NamedTuple):
    """An engine's tokens per second: the median of its rounds, the lowest and the highest."""

    name: str
    is_ours: bool
    median: float
    low: float
    high: float


def panels(report: dict[str, Any]) -> Iterator[tuple[str, list[Bar]]]:
    """Yield each job of the race: its title and its bars, our own first."""
    measured, versions = report["measured"], report["machine"]
    for column in measured[OWN]:
        if column.endswith(SPEED):
            job = column.removesuffix(SPEED)
            speeds = {name: [*row[column].values()] for name, row in measured.items()}
            bars = [
                Bar(f"{NAMES.get(name, name)} {versions[name]}", name == OWN, *speed) for name, speed in speeds.items()
            ]
            yield TITLES.get(job, job), bars


def picture(report: dict[str, Any]) -> str:
    """Return the picture as SVG, readable on light and dark pages."""
    parts, y = [], 8
    for title, bars in panels(report):
        y += 20
        parts.append(f'<text x="12" y="{y}" class="title">{escape(title)}</text>')
        y += 10
        scale = (WIDTH - LEFT - RIGHT) / max(bar.high for bar in bars)
        for bar in bars:
            parts += [*draw(bar, y, scale)]
            y += ROW
    machine = report["machine"]
    where = f"Model {machine['model']} in {machine['dtype']}, {machine['threads']} threads, device {machine['device']}"
    parts.append(f'<text x="12" y="{y + 22}">Tokens per second; the line spans all rounds.</text>')
    parts.append(f'<text x="12" y="{y + 40}">{escape(where)}.</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 52}" width="{WIDTH}" role="img">'
    title = "<title>Tokens per second of nanovllm, vLLM, llama.cpp and transformers</title>"
    return "\n".join([head, title, STYLE, *parts, "</svg>"]) + "\n"


def draw(bar: Bar, y: int, scale: float) -> Iterator[str]:
    """Yield a bar with its name, its spread and its number."""
    label, fill = ("ours", "own") if bar.is_ours else ("", "bar")
    yield f'<text x="{LEFT - 10}" y="{y + 13}" text-anchor="end" class="{label}">{escape(bar.name)}</text>'
    yield f'<rect x="{LEFT}" y="{y}" width="{bar.median * scale:.1f}" height="{BAR}" class="{fill}"/>'
    low, high = (LEFT + value * scale for value in (bar.low, bar.high))
    middle = y + BAR / 2
    yield f'<line x1="{low:.1f}" y1="{middle:g}" x2="{high:.1f}" y2="{middle:g}" class="spread"/>'
    yield f'<text x="{high + 8:.1f}" y="{y + 13}" class="{label}">{bar.median:.0f}</text>'
