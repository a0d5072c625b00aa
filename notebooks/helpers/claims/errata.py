"""Errata to the five texts, as a page of the book: a line for each fault, made from the claims and the programs."""

from collections.abc import Iterable
from pathlib import Path

from notebooks.helpers.claims.findings import CLAIMS, Finding
from stages.bench.texts import Case

PAGE = Path(__file__).resolve().parents[3] / "book" / "errata.md"


def page(findings: Iterable[Finding], cases: dict[str, list[Case]]) -> str:
    """Return the page."""
    known, parts = sorted(findings, key=lambda finding: finding.number), [CLAIMS["head_of_errata"]]
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
