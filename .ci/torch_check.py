"""Run the contract and the engine's tests on other versions of torch: `python .ci/torch_check.py [VERSION ...]`.

The default is the oldest version that pyproject.toml allows, and the newest one that is known to work. Each gets an
environment of its own. The last line is "N passed, N failed", counted in versions.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from fresh_env import ROOT, Environment

VERSIONS = ("2.11.0", "2.15.0")
TESTS = ("tests/test_contract.py", "tests/test_isolation.py", "nanovllm/tests/engine", "nanovllm/tests/test_record.py")


def passes(version: str) -> bool:
    """Return whether the tests pass on this version of torch."""
    with tempfile.TemporaryDirectory(prefix="nanovllm-torch-") as folder:
        environment = Environment(Path(folder, "env"))
        try:
            environment.install_torch(version)
            environment.pip(f"torch=={version}", f"{ROOT}[test]")
        except subprocess.CalledProcessError:
            print(f"torch {version} cannot be installed", flush=True)
            return False
        command = [environment.python, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *TESTS]
        variables = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return subprocess.run(command, cwd=ROOT, env=variables).returncode == 0


def main(versions: list[str]) -> int:
    """Check each version, and return the exit status."""
    results = {}
    for version in versions or VERSIONS:
        print(f"torch {version}", flush=True)
        results[version] = passes(version)
    failed = [version for version, has_passed in results.items() if not has_passed]
    print(*(f"torch {version} failed" for version in failed), sep="\n", end="\n" if failed else "")
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
