"""A red test, said in words: what is expected, what was found, where, and what to do."""

import re
import textwrap
from typing import Any

from ..chain.model import Stage, Step
from .folder import how_to


def say_red(stage: Stage, step: Step, num_green: int, red: list[dict[str, Any]]) -> None:
    """Print the first of the red tests, and how to go on."""
    print(f"Step {step.number} of {len(stage.steps)} is red: {step.title}.")
    print(f"{num_green} of {num_green + len({each['test'] for each in red})} tests are green. The first red one:\n")
    print("\n".join(red_lines(red[0])) + "\n")
    print(how_to(stage, step.number, _function_of(stage, step, red[0])))


def red_lines(told: dict[str, Any]) -> list[str]:
    """A red test for a terminal, one aspect a paragraph."""
    parts = [("the test", told["test"].partition("[")[0])]
    if told["outcome"] != "broken":
        parts.append(("expected", as_sentence(told["test"])))
    parts += [("", line) for line in _paragraphs(told.get("docstring", ""))]
    parts += [("with", ", ".join(told["params"]))] if told.get("params") else []
    parts += [("because", told["message"])] if told.get("message") else []
    places = {"asked in": told.get("test_line"), "your code": told.get("code")}
    if told.get("is_open") and (code := places.pop("your code")):
        parts.append(("found", f"{code['name']} is not written yet: {code['file']}, line {code['line']}"))
    else:
        parts += [("found" if n == 0 else "", line) for n, line in enumerate(told.get("found", []))]
    parts += [(what, _place(place)) for what, place in places.items() if place]
    return [line for what, text in parts for line in _wrapped(what, text)]


def as_sentence(test: str) -> str:
    """What a test's name says.

    >>> as_sentence("tests/test_pool.py::TestTake::test_block_0_is_taken_first[4-a]")
    'Block 0 is taken first.'
    """
    name = re.split(r"::", test.partition("[")[0])[-1].removeprefix("test_").replace("_", " ")
    return name[:1].upper() + name[1:] + "."


def _place(place: dict[str, Any]) -> str:
    name = "" if place["name"].startswith("test_") else f", {place['name']}"
    return f"{place['file']}, line {place['line']}{name}: {place['source']}"


def _paragraphs(docstring: str) -> list[str]:
    return [" ".join(each.split()) for each in docstring.split("\n\n") if each.strip()]


def _wrapped(what: str, text: str) -> list[str]:
    """The text behind its title, in lines that a terminal has room for."""
    return textwrap.wrap(
        text,
        110,
        initial_indent=f"  {what:10} ",
        subsequent_indent=" " * 13,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _function_of(stage: Stage, step: Step, told: dict[str, Any]) -> str | None:
    """The function of the step in which the red test ended, if it is one."""
    name = told.get("code", {}).get("name", "")
    return name if name in [each.name for each in step.functions] else None
