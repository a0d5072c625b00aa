"""Errata to the five texts, as a page of the book: a line for each fault, made from the claims and the programs."""

from collections.abc import Iterable
from pathlib import Path

from notebooks.helpers.claims.findings import CLAIMS, Finding
from stages.bench.texts import Case

PAGE = Path(__file__).resolve().parents[3] / "book" / "errata.md"
HEAD = """<!-- Made by `make claims` (notebooks/helpers/claims/errata.py). -->

# Errata to five texts

The course began with five texts, and we recommend all of them. They explain the memory of inference engines in few
words, with code that you can run. That code is short because it explains, and most of its faults show up only with a
second request. We wrote it [anew](../stages/bench/texts/memory_pool.py), step by step, ran it, tested the claims in
[a notebook](../notebooks/claims.ipynb), and list here what we would correct. `make claims` writes this page. The copies
that we have name neither an author nor an address.
"""


def page(findings: Iterable[Finding], cases: dict[str, list[Case]]) -> str:
    """Return the page."""
    known, parts = sorted(findings, key=lambda finding: finding.number), [HEAD]
    for name, text in CLAIMS["texts"].items():
        faults = [f"- {found.errata[name]} (Claim {found.number})" for found in known if name in found.errata]
        right = [line(case) for case in cases[name] if case.holds]
        parts.append(f"## {text['title'].strip(chr(34))}\n\n*{text['about']}*\n\n{text['right']}")
        parts.append("These ran as the text says:\n\n" + "\n".join(right) if right else "")
        parts.append("To correct:\n\n" + "\n".join([*faults, *(line(case) for case in cases[name] if not case.holds)]))
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def line(case: Case) -> str:
    """Return a case in one line.

    >>> line(Case("How many?", "2", "3", "One is lost"))
    '- How many? **2**. One is lost.'
    """
    colon = "" if case.question[-1] in "?:" else ":"
    return f"- {case.question}{colon} **{case.text}**. {case.remark}."
