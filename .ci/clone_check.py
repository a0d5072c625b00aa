"""Clone the repository, and run the first commands of README.md: `python3 .ci/clone_check.py`, or `... chat test`.

Each target of make before the first heading, except servers, gets a clone of its own with an empty cache, so it does
its job with no other step. The commands are README's, and their outputs must have what EXPECTED says. The last line is
"N passed, N failed".
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from fresh_env import ROOT, torch_index

sys.path.insert(0, str(ROOT))
from tests.blocks import commands_in, read_blocks

README = ROOT / "README.md"
QUESTION = "What is the capital of France?\n"
EXPECTED = {"run": r"^Once upon a time\W.{100,}\btokens/s\b", "chat": r"\bParis\b", "test": r"\b\d{3,} passed\b"}
SECONDS = 3600
IGNORED = ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "PY", "ARGS", "PROMPT", "XDG_CACHE_HOME")


def first_commands() -> list[list[str]]:
    """Return the commands of make on README's first screen that end by themselves."""
    heading = README.read_text(encoding="utf-8").split("\n## ")[0].count("\n")
    blocks = [block for block in read_blocks(README) if block.line <= heading and block.word != "server"]
    return [words for block in blocks for words in commands_in(block.code) if words[0] == "make"]


def does_its_job(command: list[str], folder: Path) -> bool:
    """Return whether a command prints what is expected in a new clone in `folder`."""
    clone = folder / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    caches = {"XDG_CACHE_HOME": str(folder / "cache"), "PIP_CACHE_DIR": str(folder.parent / "pip")}
    variables = {name: value for name, value in os.environ.items() if name not in IGNORED}
    variables |= {"TORCH_INDEX": torch_index(), "UV_CACHE_DIR": str(folder.parent / "uv")} | caches
    process = subprocess.Popen(
        command, cwd=clone, env=variables, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(QUESTION, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    passed = process.returncode == 0 and re.search(EXPECTED[command[1]], output, re.DOTALL | re.MULTILINE) is not None
    print(output[-4000:] if not passed else f"{shlex.join(command)}: passed", flush=True)
    return passed


def main(targets: list[str]) -> int:
    """Run the commands, or those with these targets, and return the exit status."""
    commands = [command for command in first_commands() if not targets or command[1] in targets]
    failed = []
    with tempfile.TemporaryDirectory(prefix="nanovllm-clone-") as folder:
        for number, command in enumerate(commands):
            new = Path(folder, str(number))
            new.mkdir()
            if not does_its_job(command, new):
                failed.append(shlex.join(command))
    print(*(f"{command}: failed" for command in failed), sep="\n", end="\n" if failed else "")
    print(f"{len(commands) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
