"""The numbers behind the lessons' "predict first" questions: `python -m stages.bench s1 s2`.

s1.py measures the numbers of stage 1 in about ten seconds. s1.md has its questions and answers in words, with places
for numbers: `{cache_at_16:.1f}` is a number of s1.py, and `{offload.first_token.16.ratio:.1f}` one of another table.
`python -m stages.tools.prose` fills the places in, and writes the answers into the lesson.
"""

import importlib
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

from stages.bench.models import STORYTELLER


def stages() -> list[str]:
    """Return the stages that have a file here, in order."""
    result = (re.fullmatch(r"s(\d+)", path.stem) for path in Path(__file__).parent.glob("s*.py"))
    return [match[0] for match in sorted(filter(None, result), key=lambda match: int(match[1]))]


def measure(stage: str, args: Namespace) -> dict[str, Any]:
    """Return a stage's numbers by name, and the holes of stage 1."""
    module = importlib.import_module(f"{__name__}.{stage}")
    extra = {"holes": module.holes(STORYTELLER)} if stage == "s1" else {}
    return {"predict": {stage: module.measure(STORYTELLER)}, **extra}
