"""Run a stage: `python -m stages [N] [PROMPT ...] [flags]`.

N picks a stage, or a branch such as more_speculation. The default is the last stage. The other arguments go to that
stage's own command line. A prompt that is a number goes after a double dash: `python -m stages -- 42`.
`--trace FILE`, for any stage, writes what its engine does to a file of events (nanovllm/trace/EVENTS.md).
"""

import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


def find_stages(folder: Path) -> dict[int, str]:
    """Return the stages in `folder`, in order: {1: "s1_contiguous_cache", ...}."""
    found = (re.fullmatch(r"s(\d+)_\w+", path.parent.name) for path in folder.glob("s*_*/__main__.py"))
    return dict(sorted((int(match[1]), match[0]) for match in found if match))


def find_branches(folder: Path) -> list[str]:
    """Return the branches in `folder`: ["more_one", ...]."""
    return sorted(path.parent.name for path in folder.glob("more_*/__main__.py"))


def pick(argv: list[str], stages: dict[int, str], branches: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Return the stage or branch that the command line names, and the arguments left for it.

    >>> pick(["2", "A fox"], {1: "s1_one", 2: "s2_two", 3: "s3_three"})
    ('s2_two', ['A fox'])
    >>> pick(["A fox", "--seed", "1"], {1: "s1_one", 2: "s2_two"})
    ('s2_two', ['A fox', '--seed', '1'])
    >>> pick(["more_one", "A fox"], {1: "s1_one"}, ["more_one"])
    ('more_one', ['A fox'])

    Raise LookupError if there is no such stage or branch.
    """
    if not stages:
        raise LookupError("this folder has no stages")
    if argv and re.fullmatch(r"more_\w+", argv[0]):
        if argv[0] not in branches:
            raise LookupError(f"branch must be one of {', '.join(branches) or '(there is none)'}, got {argv[0]}")
        return argv[0], argv[1:]
    match = re.fullmatch(r"s?(\d+)(_\w+)?", argv[0]) if argv else None
    if not match:
        return stages[max(stages)], argv
    number = int(match[1])
    if number not in stages:
        names = ", ".join(f"{n} ({name})" for n, name in stages.items())
        raise LookupError(f"stage must be one of {names}, got {number}")
    return stages[number], argv[1:]


def take_trace(argv: list[str]) -> tuple[str | None, list[str]]:
    """Return the file of --trace FILE, or None, and the arguments without it.

    >>> take_trace(["A fox", "--trace", "run.jsonl", "--seed", "1"]), take_trace(["--", "--trace"])
    (('run.jsonl', ['A fox', '--seed', '1']), (None, ['--', '--trace']))

    Raise LookupError if no file name follows.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    for i, argument in enumerate(argv[:end]):
        if argument == "--trace":
            if i + 1 == end:
                raise LookupError("--trace needs a file name")
            return argv[i + 1], argv[:i] + argv[i + 2 :]
        if argument.startswith("--trace="):
            return argument.removeprefix("--trace="), argv[:i] + argv[i + 1 :]
    return None, argv


def run_traced(stage: ModuleType, argv: list[str], file: str) -> int:
    """Run a stage whose LLM has a tracer as its observer. Return its exit status, or 1 if the trace is incomplete."""
    from nanovllm.trace import Tracer, traced

    make = stage.LLM
    with ExitStack() as traces:

        def make_traced(**options: Any) -> Any:
            tracer = Tracer()
            llm = make(**options, observer=tracer)
            traces.enter_context(traced(llm, file, tracer))
            return llm

        stage.LLM = make_traced  # type: ignore[attr-defined]
        try:
            status = run(stage, argv)
        except OSError as error:  # the file cannot be opened
            print(f"error: the trace: {error}", file=sys.stderr)
            return 2
        finally:
            stage.LLM = make  # type: ignore[attr-defined]
        try:
            traces.close()
        except OSError as error:  # a full disk
            print(f"error: the trace: {error}", file=sys.stderr)
            return status or 1
    return status


def run(stage: ModuleType, argv: list[str]) -> int:
    """Return the exit status of a stage, including argparse's own."""
    try:
        return stage.main(argv)
    except SystemExit as stopped:  # --help, or an invalid option
        return int(stopped.code or 0)


def main(argv: list[str] | None = None) -> int:
    """Pass the command line on to a stage. Return its exit status, or 2 after printing a one-line error."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] in (["-h"], ["--help"]):
        print(__doc__)
    try:
        trace, argv = take_trace(argv)
        folder = Path(__file__).parent
        name, rest = pick(argv, find_stages(folder), find_branches(folder))
        stage = import_module(f"stages.{name}.__main__")
    except LookupError as error:
        print(error, file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "sentencepiece", "safetensors", "numba"):
            raise
        how = f"`make run` creates an environment, and `pip install {error.name}` adds it to this one"
        print(f"{error.name} is not installed for {sys.executable}; {how}", file=sys.stderr)
        return 2
    return run(stage, rest) if trace is None else run_traced(stage, rest, trace)


if __name__ == "__main__":
    sys.exit(main())
