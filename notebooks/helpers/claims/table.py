"""A claim, how it was tested, what came of it; and the committed figures that a verdict may rest on."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from notebooks.helpers import pictures
from stages.bench import results


class Text(NamedTuple):
    title: str
    kind: str

    def __str__(self) -> str:
        return f'"{self.title}" ({self.kind})'


SLABS = Text("Memory Pool Management: Slab Allocators for GPU Inference", "blog post with Python code")
LAYOUT = Text("PagedAttention: memory layout and kernel analysis", "blog post, figures of an A100")
POINTER = Text("vLLM v1 Block Manager: KV cache at the pointer level", "blog post with Python code")
BLOG = Text("paged attention", "blog post with Python code")
SOLVES = Text("How PagedAttention Solves the Memory Fragmentation Problem", "article about a C++ engine")


class Finding(NamedTuple):
    number: int  # of the claim
    claim: str
    texts: tuple[Text, ...]
    how: str  # it was tested
    figure: str  # with its spread, where a clock was read
    verdict: str


def tell(*findings: Finding) -> tuple[Finding, ...]:
    """Show them below the cell, one after the other."""
    parts = [
        f"**{finding.number}. {finding.claim}**\n\n- from {'; '.join(map(str, finding.texts))}\n- tested: "
        f"{finding.how}\n"
        f"- found: {finding.figure}\n- **verdict: {finding.verdict}**"
        for finding in findings
    ]
    pictures.say("\n\n".join(parts))
    return findings


def table(findings: Sequence[Finding], shown: int = 3) -> str:
    """All of them in order, those after the first `shown` folded."""
    head = "| | claim | from | how it was tested | found | verdict |\n|---|---|---|---|---|---|\n"
    rows = [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        for cells in (
            (str(f.number), f.claim, "; ".join(map(str, f.texts)), f.how, f.figure, f.verdict) for f in sorted(findings)
        )
    ]
    more = f"\n\n<details><summary>{len(rows) - shown} more</summary>\n\n{head}" + "\n".join(rows[shown:])
    return head + "\n".join(rows[:shown]) + (more + "\n\n</details>" if len(rows) > shown else "")


# ---- committed figures


class Timing(NamedTuple):
    """A median and its spread. One that was never measured is nan."""

    value: float
    least: float
    largest: float

    def text(self, form: str = "{:.2f}", scale: float = 1.0) -> str:
        """
        >>> Timing(2.0, 1.5, 3.0).text("{:.1f}")
        '2.0 (1.5 to 3.0)'
        """
        if math.isnan(self.value):
            return "not measured yet"
        value, least, largest = (form.format(scale * number) for number in self)
        return f"{value} ({least} to {largest})"

    @property
    def is_one(self) -> bool:
        """Both are the same, as far as the rounds tell: they found it below 1 and above.

        >>> Timing(1.1, 0.9, 1.4).is_one, Timing(1.3, 1.2, 1.4).is_one
        (True, False)
        """
        return self.least <= 1 <= self.largest


def committed(key: str) -> Timing:
    """What results.json has under a key, with its spread: committed("claims.fork.copy_one")."""
    path, name = key.rsplit(".", 1)
    found = under(path)
    if not isinstance(found, dict) or name not in found:
        return Timing(math.nan, math.nan, math.nan)
    value = found[name]
    if isinstance(value, dict):
        return Timing(value["ratio"], value["least"], value["largest"])
    return Timing(value, *found.get(f"{name}_spread", (value, value)))


def under(path: str) -> Any:
    """What results.json has at a place, or None."""
    found: Any = results.read()
    for part in path.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def in_words(timing: Timing, low: str, same: str, high: str) -> str:
    """One of three verdicts about a ratio; "not measured yet" where it is nan.

    >>> in_words(Timing(1.3, 1.2, 1.4), "quicker", "the same", "slower")
    'slower'
    """
    if math.isnan(timing.value):
        return "not measured yet"
    return same if timing.is_one else high if timing.value > 1 else low
