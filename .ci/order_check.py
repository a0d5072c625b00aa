"""Run `make test` in three random orders. A test that needs another one's leftovers fails in one of them.

pytest-randomly switches itself on wherever it is installed, so it goes into a folder of its own. Run a seed again with

    python3 .ci/order_check.py SEED
"""

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv" / "bin" / "python"
PLUGIN = "pytest-randomly==5.1.0"


def main(words: list[str]) -> int:
    """Return 1 if a test fails in one of the orders."""
    seeds = [int(word) for word in words] or random.sample(range(2**31), 3)
    subprocess.run(["make", "--no-print-directory", "setup"], cwd=ROOT, check=True)
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        install = [PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, PLUGIN]
        subprocess.run(install, check=True)
        for seed in seeds:
            print(f"order {seed}", flush=True)
            command = ["make", "--no-print-directory", "test", f"ARGS=--randomly-seed={seed}"]
            if subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": folder}).returncode:
                failed.append(seed)
    print(f"{len(seeds) - len(failed)} of {len(seeds)} orders passed" + (f", failed: {failed}" if failed else ""))
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
