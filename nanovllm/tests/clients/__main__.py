"""Run the programs of client libraries: `python -m nanovllm.tests.clients [PROGRAM ...]`, after .ci/setup_clients.py.

It starts the servers that the programs need and runs each program in a process of its own. A run of all programs also
writes the table in nanovllm/docs/clients.md. The last line is "N passed, N failed".
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from .servers import ROOT, server
from .table import PAGE, PROGRAMS, Client, Result, clients, render, row

VENV = ROOT / ".venv-clients"
SECONDS = 300  # for a program


def main(programs: Sequence[str]) -> int:
    """Run all programs, or those with these names. Return the exit status."""
    chosen = [client for client in clients() if not programs or client.program in programs]
    results: dict[str, list[Result]] = {}  # by the client's name
    with tempfile.TemporaryDirectory(prefix="nanovllm-clients-") as folder:
        for name in dict.fromkeys(client.server for client in chosen):
            with server(name, Path(folder, name)) as url:
                for client in chosen:
                    if client.server == name:
                        results[client.name] = list(run(client, url, Path(folder)))
                        print(f"{client.name} {client.version}:", flush=True)
                        for function, error in results[client.name]:
                            print(f"  {function}: {error or 'works'}", flush=True)
    if not programs:
        rows = [row(client, results[client.name]) for client in chosen]
        PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    outcomes = [result.error is None for each in results.values() for result in each]
    print(f"{outcomes.count(True)} passed, {outcomes.count(False)} failed")
    return 0 if all(outcomes) else 1


def run(client: Client, url: str, folder: Path) -> Iterator[Result]:
    """Run a program, and yield a result for each of its functions, even if the process ends early."""
    file = folder / "results.jsonl"
    file.write_text("")
    variables = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none", "HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    variables["OMP_NUM_THREADS"] = "1"
    variables |= {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    try:
        done = subprocess.run([*command(client, file), client.only], env=variables, cwd=ROOT, timeout=SECONDS)
        ending = f"the program ended with status {done.returncode}"
    except subprocess.TimeoutExpired:
        ending = f"the program took more than {SECONDS} seconds"
    results = map(json.loads, file.read_text().splitlines())
    errors = {result["function"]: result["error"] for result in results}
    for function in client.functions:
        yield Result(function, errors.get(function, ending))


def command(client: Client, results: Path) -> list[str | Path]:
    """Return the command that runs a program in its environment."""
    if client.is_python:
        return [VENV / client.path.stem / "bin" / "python", PROGRAMS / "run.py", results, client.path]
    node = VENV / "node"  # a module finds the packages that are next to it
    for file in ("run.mjs", client.program):
        shutil.copy(PROGRAMS / file, node)
    return [node / "node_modules" / ".bin" / "node", node / "run.mjs", results, node / client.program]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
