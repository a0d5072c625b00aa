"""The texts' own programs, written anew, step by step: a file for each subject, in the order of the texts.

A file has the text's logic, and cases(), which runs it beside a stage's own parts. A comment marks each step where the
two part. run() runs the cases in another process, with a time limit. Start with memory_pool.py.
"""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from stages.bench.engines import new_sequence, part, stage
from stages.bench.models import STORYTELLER

ROOT = Path(__file__).parents[3]


Cases = dict[str, tuple[str, ...]]  # what the text's program printed, and what a stage did, by the keys of cases.toml
WORDS = tomllib.loads(Path(__file__).with_name("cases.toml").read_text(encoding="utf-8"))


class Case(NamedTuple):
    """A situation, and what came out of both programs. The last field is ours: no program prints it."""

    question: str
    text: str
    stages: str
    remark: str
    holds: bool = False  # as the text says


PROGRAMS = {  # by the text's name in claims.toml
    "memory_pool": ("memory_pool", "caching_sketch"),
    "layout": ("memory_layout",),
    "pointer": ("block_manager", "prefix_index", "pointer_level"),
    "blog": ("paged_attention",),
    "solves": ("cpp_engine",),
}

NAMES = {
    "memory_pool": "Memory Pool Management",
    "layout": "PagedAttention: memory layout",
    "pointer": "vLLM v1 Block Manager",
    "blog": "paged attention",
    "solves": "How PagedAttention Solves the Memory Fragmentation Problem",
}


def run(*names: str, seconds: float = 60) -> dict[str, list[Case]]:
    """Run programs in a process of their own, and return the cases of each. Raise TimeoutExpired after `seconds`."""
    command = [sys.executable, "-m", "stages.bench.texts", *names]
    done = subprocess.run(command, cwd=ROOT, timeout=seconds, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the programs ended with status {done.returncode}: {done.stderr}")
    return {name: as_cases(WORDS[name], cases) for name, cases in json.loads(done.stdout).items()}


def as_cases(words: dict[str, dict[str, Any]], cases: Cases) -> list[Case]:
    """Put the words of cases.toml around what the programs printed."""
    assert [*words] == [*cases], f"cases.toml has {[*words]}, the programs have {[*cases]}"
    return [
        Case(words[key]["question"], row[0], row[1] if row[1:] else "-", words[key]["remark"], "holds" in words[key])
        for key, row in cases.items()
    ]


def run_all(seconds: float = 60) -> dict[str, list[Case]]:
    """Run all programs, and return the cases of each text."""
    cases = run(*(name for names in PROGRAMS.values() for name in names), seconds=seconds)
    return {text: [case for name in names for case in cases[name]] for text, names in PROGRAMS.items()}


def table(cases: list[Case]) -> str:
    """Return cases as Markdown."""
    rows = "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in case[:4])} |\n" for case in cases)
    return "| | the text's program printed | a stage printed | what to note |\n|---|---|---|---|\n" + rows


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
