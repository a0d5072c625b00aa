"""The texts' own programs, written anew, step by step: a file for each subject, in the order of the texts.

A file has the text's logic, and a function for each situation of cases.toml. It returns what the text's program
prints, or that and a stage's answer, which comes from in_stages.py. A comment marks each step where the two part. run()
runs the situations in another process, with a time limit. Start with memory_pool.py.
"""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stages.bench.engines import new_sequence, part, stage
from stages.bench.models import STORYTELLER

ROOT = Path(__file__).parents[3]
WORDS = tomllib.loads(Path(__file__).with_name("cases.toml").read_text(encoding="utf-8"))  # by program, and by case
NAMES, PROGRAMS = WORDS.pop("names"), WORDS.pop("programs")  # by the text's name in claims.toml


class Case(NamedTuple):
    """A situation, and what came out of both programs. The last field is ours: no program prints it."""

    question: str
    text: str
    stages: str
    remark: str
    holds: bool = False  # as the text says


def run(*names: str, seconds: float = 60) -> dict[str, list[Case]]:
    """Run programs in a process of their own, and return the cases of each. Raise TimeoutExpired after `seconds`."""
    command = [sys.executable, "-m", "stages.bench.texts", *names]
    done = subprocess.run(command, cwd=ROOT, timeout=seconds, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the programs ended with status {done.returncode}: {done.stderr}")
    return {name: as_cases(WORDS[name], printed) for name, printed in json.loads(done.stdout).items()}


def as_cases(words: dict[str, dict[str, Any]], printed: dict[str, Any]) -> list[Case]:
    """Put the words of cases.toml around what the programs printed."""
    rows = {key: answer if isinstance(answer, list) else (answer, "-") for key, answer in printed.items()}
    return [
        Case(each["question"], f"{rows[key][0]}", f"{rows[key][1]}", each["remark"], each.get("holds", False))
        for key, each in words.items()
    ]


def run_all(seconds: float = 60) -> dict[str, list[Case]]:
    """Run all programs, and return the cases of each text."""
    cases = run(*(name for names in PROGRAMS.values() for name in names), seconds=seconds)
    return {text: [case for name in names for case in cases[name]] for text, names in PROGRAMS.items()}


def table(cases: list[Case]) -> str:
    """Return cases as Markdown."""
    return markdown_table(["", "the text's program printed", "a stage printed", "what to note"], [c[:4] for c in cases])


def markdown_table(header: list[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table whose cells may contain anything."""
    lines = [[str(cell).replace("|", r"\|") for cell in row] for row in (header, *rows)]
    lines.insert(1, ["---"] * len(header))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rounded(error: float) -> str:
    """Return an error of arithmetic, the same on every machine.

    >>> rounded(2e-7), rounded(0.149)
    ('under 1e-6', '0.15')
    """
    return "under 1e-6" if error < 1e-6 else f"{error:.2f}"


def attempt(call: Callable[[], object]) -> str:
    """Return the error that a call raises, in words.

    >>> attempt(lambda: [].pop())
    'IndexError: pop from empty list'
    """
    try:
        call()
    except Exception as error:  # any error is an answer
        return f"{type(error).__name__}: {error}"
    return "no error"


def sequence(name: str, request_id: str, token_ids: list[int]) -> Any:
    """Return a sequence of a stage."""
    config = part(name, "llama").ModelConfig.from_folder(STORYTELLER)
    inputs = part(name, "input_processor").InputProcessor(config, None, 1024, 0)
    return new_sequence(name, inputs, request_id, token_ids, stage(name).SamplingParams())
