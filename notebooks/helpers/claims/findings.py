"""A finding: a claim of claims.toml, the result, and a verdict. It may rest on figures of results.json and of a GPU."""

import math
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from notebooks.helpers import pictures
from stages.bench import gpu, results
from stages.bench.gpu.common import read_results
from stages.bench.texts import markdown_table

CLAIMS = tomllib.loads(Path(__file__).with_name("claims.toml").read_text(encoding="utf-8"))


class Finding(NamedTuple):
    """A claim, the texts that make it, how it was tested (by a run, a clock, a GPU, or on paper), and the result."""

    number: int
    claim: str
    texts: str
    by: str
    tested: str
    found: str
    verdict: str
    errata: dict[str, str]  # by text: what to correct in it


def finding(number: int, holds_as_worded: bool = True, **values: object) -> Finding:
    """Return the finding about a claim. `values` fill the words of the result, of the verdict, and of the errata.

    So do committed figures, as in {t[claims.fork.copy_one]:.1f}. `holds_as_worded` is the condition under which the
    fixed words of the verdict are true.
    """
    claim = CLAIMS["claims"][str(number)]
    assert holds_as_worded, f"the verdict on claim {number} is no longer true: {values}"
    values["t"] = Committed()
    texts = "; ".join(CLAIMS["texts"][name]["title"] for name in claim["from"])
    found, verdict = (claim[key].format(**values) for key in ("found", "verdict"))
    errata = {name: words.format(**values) for name, words in claim.get("errata", {}).items()}
    return Finding(number, claim["claim"], texts, claim["by"], claim["tested"], found, verdict, errata)


def show(*findings: Finding) -> tuple[Finding, ...]:
    """Show findings below the cell, and return them."""
    parts = [
        f"**{f.number}. {f.claim}**\n\n- from {f.texts}\n- {f.by}: {f.tested}\n- found: {f.found}\n"
        f"- **verdict: {f.verdict}**"
        for f in findings
    ]
    pictures.say("\n\n".join(parts))
    return findings


def table(findings: Sequence[Finding], shown: int = 3) -> str:
    """Return a table of all findings in order, with those after the first `shown` folded."""
    head = ["", "claim", "from", "how", "tested", "found", "verdict"]
    rows = [f[:-1] for f in sorted(findings, key=lambda finding: finding.number)]
    folded = markdown_table(head, rows[shown:])
    more = f"\n<details><summary>{len(rows) - shown} more</summary>\n\n{folded}\n</details>"
    return markdown_table(head, rows[:shown]) + (more if rows[shown:] else "")


# ---- committed figures


class Timing(NamedTuple):
    """A median and its spread, or nan if it was never measured."""

    value: float
    least: float
    largest: float

    def __format__(self, spec: str) -> str:
        """Return the median with its spread. The format may end with a factor.

        >>> f"{Timing(2.0, 1.5, 3.0)}, {Timing(2.0, 1.5, 3.0):.0f*1000}"
        '2.00 (1.50 to 3.00), 2000 (1500 to 3000)'
        """
        if math.isnan(self.value):
            return "not measured yet"
        form, _, factor = spec.partition("*")
        value, least, largest = (format(float(factor or 1) * number, form or ".2f") for number in self)
        return f"{value} ({least} to {largest})"

    @property
    def is_one(self) -> bool:
        """Return whether a ratio may be 1: some rounds found less, and some found more.

        >>> Timing(1.1, 0.9, 1.4).is_one, Timing(1.3, 1.2, 1.4).is_one
        (True, False)
        """
        return self.least <= 1 <= self.largest


def spread(row: dict[str, Any], name: str) -> Timing:
    """Return a number of a table's row with its spread."""
    value = row.get(name, math.nan)
    return Timing(value, *row.get(f"{name}_spread", (value, value)))


def committed(key: str) -> Timing:
    """Return a figure of results.json with its spread, as in committed("claims.fork.copy_one")."""
    path, name = key.rsplit(".", 1)
    return spread(under(path) or {}, name)


class Committed:
    """The figures of results.json by their keys, for the words of claims.toml."""

    def __getitem__(self, key: str) -> Timing:
        return committed(key)


def machines() -> str:
    """Return the machines of the committed times."""
    own, others = under("claims.machine"), under("machine")
    same = own is None or str(others).startswith(own)
    return f"Committed times are from {others}" + ("." if same else f", and those of this notebook's own from {own}.")


def under(path: str) -> Any:
    """Return the part of results.json at a path, or None."""
    part: Any = results.read()
    for name in path.split("."):
        part = part.get(name) if isinstance(part, dict) else None
    return part


def in_words(timing: Timing, low: str, same: str, high: str) -> str:
    """Return one of three verdicts on a ratio, or "not measured yet".

    >>> in_words(Timing(1.3, 1.2, 1.4), "faster", "the same", "slower")
    'slower'
    """
    if math.isnan(timing.value):
        return f"{timing}"
    return same if timing.is_one else high if timing.value > 1 else low


# ---- a GPU's figures

GPUS = Path(gpu.__file__).parent  # a folder for each machine, with the files of `make gpu`
Rows = dict[str, dict[str, Any]]


class GpuTable(NamedTuple):
    """A table of `make gpu`, and the name of the GPU."""

    machine: str
    rows: Rows


def on_gpu(part: int, title: str) -> GpuTable | None:
    """Return the newest table of a part whose title contains these words, without failed rows, or None."""
    runs = [read_results(file) for file in sorted(GPUS.glob(f"*/part{part}.json"))]
    for run in sorted(runs, key=lambda run: str(run.get("measured", "")), reverse=True):
        for name, rows in run["tables"].items():
            good = {key: row for key, row in rows.items() if "failed" not in row}
            if title in name and good:
                return GpuTable(run["machine"].split(",")[0], good)
    return None


def of_gpu(part: int, title: str, words: Callable[[str, Rows], str], missing: str = "") -> str:
    """Return words about the machine and the rows of such a table, or others if it or one of its rows is missing."""
    with suppress(KeyError):
        if table := on_gpu(part, title):
            return words(*table)
    return missing or not_measured(part)


def not_measured(part: int) -> str:
    """Return the words for a GPU's figure that is still missing."""
    return f"not measured (make gpu PART={part})"
