"""The race with other engines: README.md's picture and the docs' table, from notebooks/peers.json (`make peers`)."""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from stages.tools.prose.markdown import table

PICTURE, REPORT, PAGE = "peers.svg", "peers.json", "race.md"
FILE = Path(__file__).resolve().parents[3] / "notebooks" / REPORT
OWN = "nanovllm"
SPEED, FIRST_TOKEN, SHARE = ": tokens per second", ": first token ms", ": share of the floor"
SPEEDUP, TO_FIRST_TOKEN = f": {OWN}'s speedup", ": ms to its first token"
COLUMNS = {  # jobs in the picture: the first two that a report has
    "1 sequence": "one sequence",
    "mixed": "32 requests of mixed lengths",
    "16 sequences": "16 sequences",
}
UNTRIED = " was not tried with "  # in a line that a report says, after the engine's name
NAMES = {"vllm": "vLLM", "transformers": "transformers generate", "transformers-batch": "transformers generate_batch"}
WIDTH, LEFT, GAP, RIGHT = 780, 214, 20, 56  # of the picture, of the names, between columns, and of a column's numbers
BAR, ROW = 12, 19
CAPTION = 110  # characters in a line below the bars
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


def dtype_of(report: Report) -> str:
    """Return the format of the weights of engines whose names don't say it."""
    return str(report.get("file") or report["machine"]["dtype"])


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
        jobs = [job for job in COLUMNS if job + SPEED in report["measured"][OWN]][:2]
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
            title = escape(title_of(name, dtype_of(report)))
            parts.append(f'<text x="{LEFT - 10}" y="{y - 1}" text-anchor="end" {label}>{title}</text>')
        y += 6
    lines = ["Tokens per second; the thin line spans all rounds.", *places(reports), *settings_lines(reports)]
    for line in chain.from_iterable(wrap(each, CAPTION) for each in lines):
        y += 18
        parts.append(f'<text x="12" y="{y + 6}">{escape(line)}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 18}" width="{WIDTH}" role="img">'
    title = "<title>Tokens per second of nanovllm, vLLM, llama.cpp and transformers</title>"
    return "\n".join([head, title, STYLE, *parts, "</svg>"]) + "\n"


def draw(bar: Bar, x: float, y: float, scale: float, is_ours: bool) -> Iterator[str]:
    """Yield a bar with its spread and its number."""
    label, fill = ("ours", "own") if is_ours else ("", "bar")
    yield f'<rect x="{x:g}" y="{y}" width="{bar.median * scale:.1f}" height="{BAR}" class="{fill}"/>'
    low, high = (x + value * scale for value in (bar.least, bar.largest))
    yield f'<line x1="{low:.1f}" y1="{y + BAR / 2:g}" x2="{high:.1f}" y2="{y + BAR / 2:g}" class="spread"/>'
    yield f'<text x="{high + 6:.1f}" y="{y + BAR - 2}" class="{label}">{bar.median:.0f}</text>'


def places(reports: list[Report]) -> Iterator[str]:
    """Yield a line for each machine: the models that were raced on it, and the processor."""
    machines = [where(report) for report in reports]
    for machine in dict.fromkeys(machines):
        models = [report for report, other in zip(reports, machines, strict=True) if other == machine]
        yield f"{names_of(models)}: {machine}."


def names_of(reports: list[Report]) -> str:
    """Return the names of models.

    >>> names_of([{"model": "7M"}, {"model": "135M"}, {"model": "1.1B in Q8_0"}])
    '7M, 135M and 1.1B in Q8_0'
    """
    *others, last = (report["model"] for report in reports)
    return " and ".join([*([", ".join(others)] if others else []), last])


def where(report: Report) -> str:
    """Return the machine of a race. Old reports don't name the processor."""
    machine = report["machine"]
    place = report.get("host") or f"{machine['threads']} threads, torch {machine['torch']}"
    return f"{place}, device {machine['device']}"


# ---- the settings


def settings_lines(reports: list[Report]) -> list[str]:
    """Return the lines that name the settings of other engines, for the picture."""
    engines = {NAMES.get(name, name): " or with ".join(own) for name, own in advice_of(reports).items()}
    return [f"{name} ran each job with {settings}, whichever was faster." for name, settings in engines.items()]


def settings_block(results: Results) -> str:
    """Return what README.md and race.md say of the settings."""
    return settings_text(json.loads(FILE.read_text(encoding="utf-8")))


def settings_text(reports: list[Report]) -> str:
    """Return lines that name the settings of other engines, and the people who recommend them."""
    lines = [
        f"Each job counts at the faster setting: {NAMES.get(name, name)} with "
        + ", or with ".join(f"{setting} ({who})" for setting, who in own.items())
        + "."
        for name, own in advice_of(reports).items()
    ]
    says = chain.from_iterable(report.get("says", []) for report in reports)
    untried = dict.fromkeys(line.partition(":")[0].partition(UNTRIED) for line in says if UNTRIED in line)
    lines += [f"{NAMES.get(name, name)}{words}{what}." for name, words, what in untried]
    return "\n".join(lines) + "\n"


def advice_of(reports: list[Report]) -> dict[str, dict[str, str]]:
    """Return the settings of each engine, with the people who recommend them."""
    advice: dict[str, dict[str, str]] = {}
    for report in reports:
        for name, own in report.get("advice", {}).items():
            advice[name] = advice.get(name, {}) | own
    return advice


# ---- the table


def peers_block(results: Results) -> str:
    """Return a table for each model: every engine, every job, with the least and the largest of the rounds."""
    return "\n".join(table_of(report) for report in json.loads(FILE.read_text(encoding="utf-8")))


def table_of(report: Report) -> str:
    """Return the tables of a model: the speeds, and the settings of other engines at which each job was fastest."""
    if report.get("file"):
        return table_of_file(report)
    machine, measured = report["machine"], report["measured"]
    jobs = [name for name in measured[OWN] if name.endswith((SPEED, FIRST_TOKEN))]
    heads = [name.removesuffix(SPEED).replace(FIRST_TOKEN, TO_FIRST_TOKEN) for name in jobs]
    rows = [
        [title_of(name, machine["dtype"]), *(shown(row.get(job)) for job in jobs)] for name, row in measured.items()
    ]
    text = f"{heading(report)}\n\n{table(['tokens per second', *heads], rows)}"
    variants = report.get("variants", {})
    raced = [job.removesuffix(SPEED).removesuffix(FIRST_TOKEN) for job in jobs]
    best = [
        [title_of(name, machine["dtype"]), *(own[job]["best"] if job in own else "–" for job in raced)]
        for name, own in variants.items()
    ]
    return text + ("\n" + table(["fastest with", *raced], best) if best else "")


def heading(report: Report) -> str:
    """Return a line with the model, the machine and the engines' versions."""
    machine = report["machine"]
    versions = [f"{name} {machine[name]}" for name in report["measured"] if name in machine]
    return f"**{report['model']}**: {where(report)}; {'; '.join(versions)}."


def table_of_file(report: Report) -> str:
    """Return the table of a file that this engine and others read: a row per job, and whether their tokens agree."""
    measured, variants = report["measured"], report.get("variants", {})
    others = [name for name in measured if name != OWN]
    heads, rows = [OWN, "share of the floor"], []
    for name in others:
        heads += [title_of(name, ""), "share of the floor", "fastest with", f"{OWN}'s speed"]
    for key in (key for key in measured[OWN] if key.endswith((SPEED, FIRST_TOKEN))):
        job = key.removesuffix(SPEED).removesuffix(FIRST_TOKEN)
        row = [key.removesuffix(SPEED).replace(FIRST_TOKEN, TO_FIRST_TOKEN), *speed_and_share(measured[OWN], key, job)]
        for name in others:
            best = variants.get(name, {}).get(job, {}).get("best", "–")
            row += [*speed_and_share(measured[name], key, job), best, times(measured[name][job + SPEEDUP])]
        rows.append(row)
    agreement = [line for name, by_job in report.get("agreement", {}).items() for line in agreements(name, by_job)]
    lines = agreement if report["settings"].get("written") else []  # random weights write the same few tokens
    return f"{heading(report)}\n\n{table(['tokens per second', *heads], rows)}" + "".join(f"\n{line}" for line in lines)


def speed_and_share(numbers: dict[str, Any], key: str, job: str) -> list[str]:
    """Return an engine's cells for a job: its speed, and the share of its time that reading takes at least."""
    return [shown(numbers[key]), f"{numbers[job + SHARE]:.0%}" if job + SHARE in numbers else "–"]


def agreements(engine: str, by_job: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each job: how far an engine's greedy tokens are those of this engine."""
    for job, agreement in by_job.items():
        if not job.startswith("prompt "):  # those are random tokens
            shares = agreement["shares"]
            if min(shares) == 1:
                yield f"- {title_of(engine, '')}, {job}: the same greedy output for all {len(shares)}."
                continue
            same = f"the same greedy output for {sum(share == 1 for share in shares)} of {len(shares)}"
            mean = f"{sum(shares) / len(shares):.0%} of an output comes before the first different token"
            tie = f"where the two best logits are at most {agreement['margin']:.2g} apart"
            yield f"- {title_of(engine, '')}, {job}: {same}; on average, {mean}, {tie}."


def times(spread: dict[str, float]) -> str:
    """Return a ratio with its spread.

    >>> times({"median": 1.93, "least": 1.8, "largest": 2.0}), times({"median": 1.1, "least": 0.9, "largest": 1.3})
    ('1.93 times (1.80 to 2.00)', 'the same (0.90 to 1.30)')
    """
    median = "the same" if spread["least"] <= 1 <= spread["largest"] else f"{spread['median']:.2f} times"
    return f"{median} ({spread['least']:.2f} to {spread['largest']:.2f})"


def shown(spread: dict[str, float] | None) -> str:
    """Return a median with its spread.

    >>> shown({"median": 97.2, "least": 90.4, "largest": 1234.5})
    '97 (90 to 1,234)'
    """
    if spread is None:
        return "–"
    return f"{spread['median']:,.0f} ({spread['least']:,.0f} to {spread['largest']:,.0f})"


BLOCKS = {"peers": peers_block, "race_settings": settings_block}
