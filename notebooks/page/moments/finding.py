"""What a moment is, and what finds one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from notebooks.page.record import Run

Finder = Callable[[Run], "Moment | None"]


@dataclass(frozen=True)
class Moment:
    step: int  # the step that shows it; the question is asked before it
    title: str
    sentence: str  # what there is to know before the step
    question: str
    answers: tuple[str, str]
    right: int
    reveal: str
    block: int | None = None  # to look at


class Found(NamedTuple):
    stage: str
    find: Finder


FINDERS: list[Found] = []


def moment(stage: str) -> Callable[[Finder], Finder]:
    """The function finds a moment of this stage; it returns None if the run has none."""

    def register(find: Finder) -> Finder:
        FINDERS.append(Found(stage, find))
        return find

    return register


def blocks(count: int) -> str:
    """
    >>> blocks(1), blocks(2)
    ('1 block', '2 blocks')
    """
    return f"{count} block{'s' * (count != 1)}"
