"""The answers to the lessons' "predict first" questions, measured: `python -m stages.bench s1 s2`.

s1.md has the questions and answers of stage 1 in words, with places for numbers: `{cache_at_16:.1f}` is a number of
s1.py, `{/offload.first_token.16.ratio:.1f}` one of another table, and `{=growth:.1f}` a value that s1.py derives from
its numbers. s1.py measures the numbers, in about ten seconds at most. The other stages work the same way.
"""

import importlib
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.bench import results
from stages.bench.models import STORYTELLER

PLACE = re.compile(r"{([=/]?)([\w.]+)(?::([^}]+))?}")


def stages() -> list[str]:
    """Return the stages that have a file here, in order."""
    result = (re.fullmatch(r"s(\d+)", path.stem) for path in Path(__file__).parent.glob("s*.py"))
    return [match[0] for match in sorted(filter(None, result), key=lambda match: int(match[1]))]


def measure(stage: str, args: Namespace) -> dict[str, Any]:
    """Return a stage's numbers by name, its questions with their answers in words, and the holes of stage 1."""
    module = importlib.import_module(f"{__name__}.{stage}")
    numbers = module.measure(STORYTELLER)
    derived = vars(module).get("derived", lambda numbers: {})  # not every stage derives a number
    text = Path(__file__).with_name(f"{stage}.md").read_text(encoding="utf-8")
    answers = fill(text, f"predict.{stage}", numbers, derived(numbers))
    extra = {"holes": module.holes(STORYTELLER)} if stage == "s1" else {}
    return {"predict": {stage: numbers | {"answers": answers}}, **extra}


def fill(text: str, prefix: str, numbers: Mapping[str, Any], derived: Mapping[str, Any]) -> list[dict[str, str]]:
    r"""Return questions and answers with their numbers, each in a mark that names its key, as in all prose.

    >>> fill("## Cost?\n\n{cost.16:.1f}, {=n}\ntimes.\n", "predict.s9", {"cost": {"16": 1.25}}, {"n": 3})
    [{'question': 'Cost?', 'answer': '<!-- n: predict.s9.cost.16:.1f -->1.2<!-- / -->, 3 times.'}]
    """

    def number(match: re.Match[str]) -> str:
        kind, key, form = match[1], match[2], match[3] or ""
        if kind == "=":
            return format(derived[key], form)
        result: Any = results.value(key) if kind == "/" else numbers
        for part in key.split(".") if kind != "/" else ():
            result = result[part]
        name = key if kind == "/" else f"{prefix}.{key}"
        return f"<!-- n: {name}{form and ':' + form} -->{result:{form}}<!-- / -->"

    entries = []
    for section in PLACE.sub(number, text).split("## ")[1:]:
        question, _, answer = section.partition("\n")
        entries.append({"question": question, "answer": " ".join(answer.split())})
    return entries


def in_words(result: Mapping[str, Any]) -> str:
    """Return the questions and answers of a measure(), without marks."""
    entries = [entry for stage in result["predict"].values() for entry in stage["answers"]]
    return re.sub("<!-- .*? -->", "", "\n".join(f"{entry['question']}\n  {entry['answer']}" for entry in entries))
