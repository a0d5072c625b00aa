"""What a moment is, and what finds one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from notebooks.page.record import Event, Run, Step, label

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


def shortage(step: Step, event: Event, who: str, free: str) -> str:
    """Say for whom `event` had to make room: `who` needs a block, and others took the last free ones in this step."""
    before = step.events[: step.events.index(event)]
    takers = list(dict.fromkeys(label(each["seq"]) for each in before if each["kind"] == "taken"))
    if not takers:
        return f"{who} needs a block, and there is no {free}."
    verb, last = ("takes", free) if len(takers) == 1 else ("take", f"{free}s")
    return f"{' and '.join(takers)} {verb} the last {last}, and {who} needs one too."


def blocks(count: int) -> str:
    """
    >>> blocks(1), blocks(2)
    ('1 block', '2 blocks')
    """
    return f"{count} block{'s' * (count != 1)}"
