"""Run the contract and the engine's tests on other versions of torch: `python .ci/torch_check.py [VERSION ...]`.

The default is the oldest version that pyproject.toml allows, and the newest one that is known to work. Each gets an
environment of its own. With the oldest one come all parts of `make gpu`, in an environment with few packages. The last
line is "N passed, N failed".
"""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from fresh_env import ROOT, Environment

VERSIONS = ("2.11.0", "2.15.0")
TESTS = ("tests/test_contract.py", "tests/test_isolation.py", "nanovllm/tests/engine", "nanovllm/tests/test_record.py")

FEW = ("triton==3.6.0", "transformers==5.17.*", "safetensors", "sentencepiece", "tokenizers", "pytest")
ABSENT = ("pydantic", "pydantic-core")  # some versions of these packages bring it
GPU_PARTS = "make gpu with few packages"


def gpu_parts_run() -> bool:
    """Return whether all parts of `make gpu` run on a CPU, with the packages of a machine that can't install more."""
    with tempfile.TemporaryDirectory(prefix="nanovllm-gpu-") as folder:
        environment, out = Environment(Path(folder, "env")), Path(folder, "out")
        try:
            environment.install_torch(VERSIONS[0])
            environment.pip(f"torch=={VERSIONS[0]}", *FEW)
        except subprocess.CalledProcessError:
            print(f"torch {VERSIONS[0]} cannot be installed with {', '.join(FEW)}", flush=True)
            return False
        subprocess.run([environment.python, "-m", "pip", "uninstall", "--quiet", "--yes", *ABSENT], check=True)
        command = [environment.python, "-m", "stages.bench.gpu", "--device", "cpu", "--tiny", "--out", out]
        variables = os.environ | {"OMP_NUM_THREADS": "1"}
        status = subprocess.run(command, cwd=ROOT, env=variables).returncode
        return status == 0 and "failed" not in (out / "summary.md").read_text(encoding="utf-8")


def passes(version: str) -> bool:
    """Return whether the tests pass on this version of torch."""
    with tempfile.TemporaryDirectory(prefix="nanovllm-torch-") as folder:
        environment = Environment(Path(folder, "env"))
        try:
            environment.install_torch(version)
            environment.pip("-c", environment.pins("torch"), f"torch=={version}", f"{ROOT}[test]")
        except subprocess.CalledProcessError:
            print(f"torch {version} cannot be installed", flush=True)
            return False
        command = [environment.python, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *TESTS]
        variables = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return subprocess.run(command, cwd=ROOT, env=variables).returncode == 0


def main(versions: list[str]) -> int:
    """Check each version, and return the exit status."""
    checks = {f"torch {version}": partial(passes, version) for version in versions or VERSIONS}
    results = {}
    for name, check in (checks if versions else checks | {GPU_PARTS: gpu_parts_run}).items():
        print(name, flush=True)
        results[name] = check()
    failed = [name for name, has_passed in results.items() if not has_passed]
    print(*(f"{name} failed" for name in failed), sep="\n", end="\n" if failed else "")
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
