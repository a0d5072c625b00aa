"""The texts' own programs, written anew from a description of their steps: a file for each text, two for the longest.

A file has the text's logic under the text's names, and cases(), which runs it beside a stage's own parts. A comment
marks each step where the two part. run() does this in another process, with a time limit. Start with memory_pool.py.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from stages.bench.engines import new_sequence, part, stage
from stages.bench.models import STORYTELLER

ROOT = Path(__file__).parents[4]


class Case(NamedTuple):
    """A situation, and the answers of both programs."""

    question: str
    text: str
    stage: str


PROGRAMS = ("memory_pool", "memory_layout", "paged_attention", "prefix_index", "pointer_level", "fragmentation")


def run(*names: str, seconds: float = 60) -> dict[str, list[Case]]:
    """Run programs in a process of their own, and return the cases of each. Raise TimeoutExpired after `seconds`."""
    command = [sys.executable, "-m", "notebooks.helpers.claims.programs", *names]
    done = subprocess.run(command, cwd=ROOT, timeout=seconds, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the programs ended with status {done.returncode}: {done.stderr}")
    return {name: [Case(*row) for row in cases] for name, cases in json.loads(done.stdout).items()}


def table(cases: list[Case]) -> str:
    """Return cases as Markdown."""
    rows = "".join(f"| {' | '.join(case)} |\n" for case in cases)
    return "| | the text's program, rewritten | the stages |\n|---|---|---|\n" + rows


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
