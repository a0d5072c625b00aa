"""Run a stage: `python -m stages [N] [PROMPT ...] [flags]`.

N picks stage N, the latest one present if there is none; what follows goes to that stage's own command line.
A prompt that is a number goes after a double dash: `python -m stages -- 42`.
"""

import re
import sys
from importlib import import_module
from pathlib import Path


def find_stages(folder: Path) -> dict[int, str]:
    """The stages in `folder`, in order: {1: "s1_contiguous_cache", ...}."""
    found = (re.fullmatch(r"s(\d+)_\w+", path.parent.name) for path in folder.glob("s*_*/__main__.py"))
    return dict(sorted((int(match[1]), match[0]) for match in found if match))


def pick(argv: list[str], stages: dict[int, str]) -> tuple[str, list[str]]:
    """The stage that the command line asks for, and the arguments that are left for it.

    >>> pick(["2", "A fox"], {1: "s1_one", 2: "s2_two", 3: "s3_three"})
    ('s2_two', ['A fox'])
    >>> pick(["A fox", "--seed", "1"], {1: "s1_one", 2: "s2_two"})
    ('s2_two', ['A fox', '--seed', '1'])

    Raises LookupError, in one line, if there is no such stage.
    """
    if not stages:
        raise LookupError("there is no stage in this folder")
    asked = re.fullmatch(r"s?(\d+)(_\w+)?", argv[0]) if argv else None
    if not asked:
        return stages[max(stages)], argv
    number = int(asked[1])
    if number not in stages:
        names = ", ".join(f"{n} ({name})" for n, name in stages.items())
        raise LookupError(f"no stage {number}: there is {names}")
    return stages[number], argv[1:]


def main(argv: list[str] | None = None) -> int:
    """Hand the command line to a stage; the stage's exit status, or 2 with one line on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] in (["-h"], ["--help"]):
        print(__doc__)
    try:
        name, rest = pick(argv, find_stages(Path(__file__).parent))
        stage = import_module(f"stages.{name}.__main__")
    except LookupError as error:
        print(error, file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "sentencepiece", "safetensors"):
            raise
        print(f"{error.name} is not installed for {sys.executable}: `make run` makes an environment", file=sys.stderr)
        return 2
    return stage.main(rest)


if __name__ == "__main__":
    sys.exit(main())
