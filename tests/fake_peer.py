"""A stand-in for a peer's interpreter: it runs other code instead of the worker."""

import stat
import sys
from pathlib import Path

ANSWERS = """
for line in sys.stdin:
    lengths = json.loads(line)["lengths"]
    tokens, times = [[7] * n for n in lengths], [[0.5 + 0.25 * i for i in range(n)] for n in lengths]
    write(tokens=tokens, times=times, idle_cpu_seconds=0.0)
"""
READY = 'write(version="9.9")'


def write_fake_peer(folder: Path, code: str = ANSWERS, ready: str = READY) -> str:
    """Write the interpreter, and return its path. Its code can call write(), which prints a line of JSON."""
    file = folder / "python"
    write = "def write(**values): print(json.dumps(values), flush=True)"
    file.write_text(f"#!{sys.executable} -IS\nimport json, os, sys\n{write}\n{ready}\n{code}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)
