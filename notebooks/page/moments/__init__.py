"""The moments that a reader should not miss: found in the recorded runs, never placed by hand.

A moment is a question before a step, and what the step shows. Which answer is right comes from the events.
"""

from dataclasses import asdict
from typing import Any

from notebooks.page.moments import batches, caching, scheduling  # each registers its finders
from notebooks.page.moments.finding import FINDERS, Moment
from notebooks.page.record import Run

__all__ = ["FINDERS", "Moment", "batches", "caching", "moments", "scheduling"]


def moments(stage: str, run: Run) -> list[dict[str, Any]]:
    """All moments of a stage, in order of time. Raises ValueError for one that the run does not have."""
    found = []
    for _, find in (each for each in FINDERS if each.stage == stage):
        one = find(run)
        if one is None:
            raise ValueError(f"{stage}: no step has the moment {find.__name__}")
        found.append(one)
    return [asdict(one) for one in sorted(found, key=lambda one: one.step)]
