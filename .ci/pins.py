"""Move the pins of constraints.txt to the newest versions: `python3.11 .ci/pins.py`, or `make pins`.

It installs every extra that the tests and the linters need into a fresh environment, without the pins, and writes down
what pip chose. torch keeps its pin: change that one by hand, together with .ci/torch_check.py. Run `.ci/run` before you
commit the new pins. It uses the oldest Python that pyproject.toml allows, so that all versions run on every later one.

    python3.11 .ci/pins.py --from .venv/bin/python    # pin what an environment has, instead of the newest
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from fresh_env import ROOT, Environment, torch_pin

OLDEST = (3, 11)
EXTRAS = "test,lint,book,mutants"
HEAD = """\
# The versions that `make` and .ci/ install. The ranges that the code runs on are in pyproject.toml.
torch=={torch}
# Everything else that tests and linters need: `make pins` moves these to the newest versions.
"""
UNPINNED = {"torch", "nanovllm", "pip", "setuptools", "triton"}  # and CUDA's libraries, which come with torch


def constraints(freeze: str) -> str:
    r"""Return the text of constraints.txt for the output of pip freeze.

    >>> print(constraints("pytest==9.2.0\nAttrs==26.1\ntorch==9+cpu\nnanovllm @ file:///x\n").split("versions.\n")[1])
    attrs==26.1
    pytest==9.2.0
    <BLANKLINE>
    """
    pins = (line.lower() for line in re.findall(r"^[\w.-]+==\S+$", freeze, re.MULTILINE))
    kept = [pin for pin in pins if (name := pin.split("==")[0]) not in UNPINNED and not name.startswith("nvidia")]
    return HEAD.format(torch=torch_pin()) + "".join(f"{pin}\n" for pin in sorted(kept))


def newest() -> str:
    """Return what pip freeze prints for a fresh environment with the newest versions."""
    with tempfile.TemporaryDirectory(prefix="nanovllm-pins-") as folder:
        environment = Environment(Path(folder, "env"))
        environment.install_torch()
        environment.pip(f"torch=={torch_pin()}", f"{ROOT}[{EXTRAS}]")
        return frozen(environment.python)


def frozen(python: Path | str) -> str:
    """Return what pip freeze prints for this interpreter."""
    command = [python, "-m", "pip", "list", "--format", "freeze", "--disable-pip-version-check"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> int:
    """Write constraints.txt, and print what changed. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--from", dest="python", metavar="PYTHON", help="pin what this interpreter can import")
    python, path = parser.parse_args().python, ROOT / "constraints.txt"
    if not python and sys.version_info[:2] != OLDEST:
        print(f"pins: needs Python 3.11, and this is {sys.version.split()[0]}", file=sys.stderr)
        return 2
    before = {*path.read_text(encoding="utf-8").splitlines()}
    text = constraints(frozen(python) if python else newest())
    path.write_text(text, encoding="utf-8")
    after = {*text.splitlines()}
    print(
        *sorted([f"- {line}" for line in before - after] + [f"+ {line}" for line in after - before], key=key), sep="\n"
    )
    return 0


def key(line: str) -> tuple[str, str]:
    """Sort by package, with the old version first."""
    return line[2:].split("==")[0], line[0].replace("+", ".")


if __name__ == "__main__":
    sys.exit(main())
