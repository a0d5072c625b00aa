"""The mutation score with its interval, and the tables of the docs page."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from tests.mutants.mutations import Mutant

STATUSES = ("killed", "timed out", "survived", "equivalent")


class Result(NamedTuple):
    """The result of one mutant."""

    mutant: Mutant
    status: str  # one of STATUSES
    diff: str
    by: str = ""  # the test that failed
    ran: int = 0  # how many tests
    seconds: float = 0.0


def wilson(hits: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the 95% interval of a share, by Wilson's formula.

    >>> [round(bound, 3) for bound in wilson(95, 100)]
    [0.888, 0.978]
    >>> wilson(0, 0)
    (0.0, 1.0)
    """
    if count == 0:
        return 0.0, 1.0
    share, squared = hits / count, z * z / count
    middle = share + squared / 2
    half = z * math.sqrt(share * (1 - share) / count + squared / (4 * count))
    return max(0.0, (middle - half) / (1 + squared)), min(1.0, (middle + half) / (1 + squared))


def score(results: Iterable[Result]) -> tuple[int, int]:
    """Return how many mutants were killed, a timeout included, and how many could have been."""
    counted = [result for result in results if result.status != "equivalent"]
    return sum(result.status != "survived" for result in counted), len(counted)


def describe_score(results: list[Result]) -> str:
    killed, count = score(results)
    low, high = wilson(killed, count)
    share = f"{killed / count:.1%}" if count else "none"
    return f"{killed} of {count} mutants killed: {share} (95% interval: {low:.1%} to {high:.1%})"


def group_of(file: str) -> str:
    """Return the row of the table that a file belongs to: a stage, or the file itself.

    >>> group_of("stages/s4_continuous_batching/engine.py"), group_of("nanovllm/engine/tier.py")
    ('stages/s4_continuous_batching', 'nanovllm/engine/tier.py')
    """
    return "/".join(file.split("/")[:2]) if file.startswith("stages/") else file


def table(results: list[Result]) -> str:
    """Return the counts by file, as a Markdown table. Each stage is one row."""
    groups: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda each: each.mutant.file):
        groups.setdefault(group_of(result.mutant.file), []).append(result)
    rows = ["| file | mutants | killed | timed out | survived | equivalent |", "|---|--:|--:|--:|--:|--:|"]
    for name, group in [*groups.items(), ("**all**", results)]:
        counts = [sum(each.status == status for each in group) for status in STATUSES]
        rows.append(f"| {name} | {len(group)} | " + " | ".join(str(count) for count in counts) + " |")
    return "\n".join(rows)


def survivors(results: list[Result]) -> str:
    """Return the surviving mutants by file, each with its id, function and diff."""
    parts = []
    for result in sorted(results, key=lambda each: (each.mutant.file, each.mutant.lineno)):
        if result.status == "survived":
            mutant = result.mutant
            title = f"{mutant.file}:{mutant.lineno} {mutant.function} ({mutant.id}, {mutant.operator})"
            ran = f"Ran {result.ran} tests." if result.ran else "No test reaches it."
            parts.append(f"### {title}\n\n{ran}\n\n```diff\n{result.diff}\n```\n")
    return "\n".join(parts)


def page(results: list[Result], population: int, seed: int, day: str, untested: str = "") -> str:
    """Return the generated part of the docs page."""
    alive = [result for result in results if result.status == "survived"]
    mutants = sorted((each.mutant for each in alive), key=lambda each: (each.file, each.function, each.line))
    listed = "\n".join(
        f"- `{each.id}` in `{each.file}`, `{each.function or 'module'}`: `{each.line}` ({each.operator})"
        for each in mutants
    )
    sample = (
        f"A sample of {len(results)} from {population:,} mutants, with seed {seed}, tested on {day}. {untested}".strip()
    )
    rest = f"Survivors:\n\n{listed}\n" if listed else "No mutant of the sample survived.\n"
    return f"{describe_score(results)}. {sample}\n\n{table(results)}\n\n{rest}"


def insert(text: str, name: str, generated: str) -> str:
    """Return a page with its generated part of this name replaced."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    head, rest = text.split(begin)
    return f"{head}{begin}\n\n{generated}\n{end}{rest.split(end)[1]}"
