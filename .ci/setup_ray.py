"""Make .venv-ray, which tests batches and replicas on Ray: `.venv/bin/python .ci/setup_ray.py`.

It has the packages of the extra `ray`, and borrows all others from the environment that runs this script. Ray requires
versions of its own, which should not change what the other tests run with.
"""

import shutil
import subprocess
import sys
import tomllib

from fresh_env import Environment
from setup_env import ROOT

VENV = ROOT / ".venv-ray"
IMPORTS = "import ray.data, ray.serve, torch, numba, pytest, nanovllm.cluster.ray_serve"


def install() -> None:
    """Make the environment. A stamp comes last, so that the next run repeats an interrupted install."""
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["ray"]
    print(f"Making .venv-ray (about 200 MB to download): {', '.join(requires)}", flush=True)
    shutil.rmtree(VENV, ignore_errors=True)
    environment = Environment(VENV)
    environment.borrow()
    environment.pip("-c", environment.pins("torch"), *requires)
    if subprocess.run([environment.python, "-c", IMPORTS], cwd=ROOT).returncode:
        sys.exit("setup: a package is missing in .venv-ray, see above; run `make clean` and try again")
    (VENV / ".complete").touch()


if __name__ == "__main__":
    install()
