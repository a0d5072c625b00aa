"""The picture of speed in README.md, notebooks/peers.svg: stages of the course next to transformers."""

from collections.abc import Iterator
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

PICTURE = "peers.svg"
WIDTH, LEFT, RIGHT = 720, 280, 70  # of the picture, and of the margins for names and numbers
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


def panels(results: dict[str, Any]) -> Iterator[tuple[str, list[Bar]]]:
    """Yield each comparison: its title and its bars."""
    one, many = results["peers"], results["serving"]
    names = {"ours": "nanovllm, stage 1", "transformers": "transformers generate"}
    yield (
        "One sequence, 7M parameters, float32",
        [Bar(name, key == "ours", one[key], *one[f"{key}_spread"]) for key, name in names.items()],
    )
    rows = {
        "nanovllm, stage 4": many["peers"]["s4"],
        "transformers generate, a static batch": many["peers"]["generate"],
        "transformers generate_batch": many["peers"]["generate_batch"],
    }
    yield (
        "32 requests of mixed lengths, 135M parameters, bfloat16",
        [
            Bar(name, name.startswith("nanovllm"), row["tokens_per_second"], *row["tokens_per_second_spread"])
            for name, row in rows.items()
        ],
    )


def picture(results: dict[str, Any]) -> str:
    """Return the picture as SVG, readable on light and dark pages."""
    parts, y = [], 8
    for title, bars in panels(results):
        y += 20
        parts.append(f'<text x="12" y="{y}" class="title">{escape(title)}</text>')
        y += 10
        scale = (WIDTH - LEFT - RIGHT) / max(bar.high for bar in bars)
        for bar in bars:
            parts += [*draw(bar, y, scale)]
            y += ROW
    machine = results["serving"]["machine"].rsplit(", ", 1)[0]
    parts.append(f'<text x="12" y="{y + 22}">Tokens per second; the line spans all rounds. {escape(machine)}.</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 34}" width="{WIDTH}" role="img">'
    title = "<title>Tokens per second of nanovllm and of transformers</title>"
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
