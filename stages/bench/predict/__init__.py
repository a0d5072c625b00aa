"""The answers to the lessons' "predict first" questions, measured: `python -m stages.bench --predict`.

One file a stage, s1.py, s2.py, ...: its `answers(model)` gives the stage's numbers by name, and under "answers" its
questions with their answers in words. A file that is here is asked; it takes about ten seconds at most.
"""

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm


def stages() -> list[str]:
    """The stages that have a file here, in order."""
    found = (re.fullmatch(r"s(\d+)", path.stem) for path in Path(__file__).parent.glob("s*.py"))
    return [match[0] for match in sorted(filter(None, found), key=lambda match: int(match[1]))]


def answers(model: Path, only: Sequence[str] = ()) -> dict[str, Any]:
    """For each stage, or each of `only`: its numbers by name, and the questions with their answers in words.

    Raises ValueError if one of `only` has no file here.
    """
    strangers = sorted({*only} - {*stages()})
    if strangers:
        raise ValueError(f"no questions of {strangers[0]}: there are those of {', '.join(stages())}")
    asked = tqdm([stage for stage in stages() if stage in only or not only], "questions")
    return {stage: importlib.import_module(f"{__name__}.{stage}").answers(model) for stage in asked}
