"""The answers to the lessons' "predict first" questions, measured: `python -m stages.bench --predict`.

One file a stage, s1.py, s2.py, ...: its `answers(model)` gives the stage's numbers by name, and under "answers" its
questions with their answers in words. A file that is here is asked; it takes about ten seconds at most.
"""

import importlib
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

from stages.bench.models import STORYTELLER


def stages() -> list[str]:
    """The stages that have a file here, in order."""
    found = (re.fullmatch(r"s(\d+)", path.stem) for path in Path(__file__).parent.glob("s*.py"))
    return [match[0] for match in sorted(filter(None, found), key=lambda match: int(match[1]))]


def measure(stage: str, args: Namespace) -> dict[str, Any]:
    """A stage's numbers by name, and its questions with their answers in words; what else its file measures."""
    module = importlib.import_module(f"{__name__}.{stage}")
    beside = {"holes": module.holes(STORYTELLER)} if stage == "s1" else {}
    return {"predict": {stage: module.answers(STORYTELLER)}, **beside}


def in_words(found: dict[str, Any]) -> str:
    """The questions and answers of a measure(), without marks."""
    entries = [entry for stage in found["predict"].values() for entry in stage["answers"]]
    return re.sub("<!-- .*? -->", "", "\n".join(f"{entry['question']}\n  {entry['answer']}" for entry in entries))
