"""The numbers behind the lessons' "predict first" questions: `python -m stages.bench s1 s2`.

s1.py measures the numbers of stage 1 in about ten seconds. s1.md has its questions and answers in words, with places
for numbers: `{cache_at_16:.1f}` is a number of s1.py, and `{offload.first_token.16.ratio:.1f}` one of another table.
`python -m stages.tools.prose` fills the places in, and writes the answers into the lesson.
"""

import importlib
from argparse import Namespace
from typing import Any

from stages.bench.models import STORYTELLER


def measure(stage: str, args: Namespace) -> dict[str, Any]:
    """Return a stage's numbers by name, and the holes of stage 1."""
    module = importlib.import_module(f"{__name__}.{stage}")
    extra = {"holes": module.holes(STORYTELLER)} if stage == "s1" else {}
    return {"predict": {stage: module.measure(STORYTELLER)}, **extra}
