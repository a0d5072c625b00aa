"""Make .venv-clients, with an environment for each client library: `.venv/bin/python .ci/setup_clients.py [FILE ...]`.

The libraries and their versions are in nanovllm/tests/clients: clients.toml for Python, package.json for Node. They
don't share an environment, because they require different versions of OpenAI's client. FILE is a program of
clients.toml; without one, all environments are made. Complete environments are kept.
"""

import shutil
import subprocess
import sys
import tomllib

from fresh_env import Environment
from setup_env import ROOT

CLIENTS = ROOT / "nanovllm" / "tests" / "clients"
VENV = ROOT / ".venv-clients"


def install_python(name: str, requires: list[str]) -> None:
    """Make an environment. A stamp comes last, so that the next run repeats an interrupted install."""
    folder, wanted = VENV / name, "\n".join(requires)
    stamp = folder / ".complete"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"Making {folder.relative_to(ROOT)}: {', '.join(requires)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    environment = Environment(folder)
    if "torch" in requires:
        environment.install_torch()
    environment.pip(*requires)
    stamp.write_text(wanted)


def install_node() -> None:
    """Install the packages that package-lock.json pins, and Node itself, into .venv-clients/node."""
    folder, files = VENV / "node", [CLIENTS / "package.json", CLIENTS / "package-lock.json"]
    stamp, wanted = folder / ".complete", "".join(file.read_text() for file in files)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"Making {folder.relative_to(ROOT)} (about 250 MB)", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in files:
        shutil.copy(file, folder)
    npm = shutil.which("npm") or sys.exit("setup: the clients for Node need npm; install Node.js")
    subprocess.run([npm, "ci", "--no-audit", "--no-fund", "--loglevel=error"], cwd=folder, check=True)
    stamp.write_text(wanted)


def install(programs: list[str]) -> None:
    """Make the environments of these programs, or all of them if the list is empty."""
    clients = tomllib.loads((CLIENTS / "clients.toml").read_text())["client"]
    unknown = {*programs} - {client["program"] for client in clients}
    if unknown:
        sys.exit(f"setup: clients.toml has no {', '.join(sorted(unknown))}")
    for client in clients:
        if not programs or client["program"] in programs:
            name, _, language = client["program"].partition(".")
            install_python(name, client["requires"]) if language == "py" else install_node()


if __name__ == "__main__":
    install(sys.argv[1:])
