"""Make .venv-triton, which tests Triton's kernels on a CPU: `.venv/bin/python .ci/setup_triton.py`.

It has one package of its own, Triton, and borrows all others from the environment that runs this script. That
environment goes without Triton, because each CUDA build of torch requires a version of its own.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from setup_env import ROOT, pip_settings, query, run

VENV = ROOT / ".venv-triton"
PYTHON = VENV / "bin" / "python"
PACKAGE = "triton==3.9.*"


def install() -> None:
    """Make the environment. A stamp comes last, so that the next run repeats an interrupted install."""
    print(f"Making .venv-triton (about 290 MB to download): {PACKAGE}", flush=True)
    shutil.rmtree(VENV, ignore_errors=True)
    uv = None if pip_settings() else shutil.which("uv")
    run(sys.executable, "-m", "venv", *(["--without-pip"] if uv else []), VENV)
    pip: list[Path | str] = [uv, "pip", "install", "--python", PYTHON] if uv else [PYTHON, "-m", "pip", "install"]
    run(*pip, "--quiet", PACKAGE)
    own = query(PYTHON, "import sysconfig; print(sysconfig.get_path('purelib'))") or sys.exit("setup: no site-packages")
    borrowed = [path for path in sys.path if path.endswith("-packages")]
    Path(own, "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))
    # In a process that shows its errors
    if subprocess.run([PYTHON, "-c", "import triton, numpy, torch, pytest"], cwd=ROOT).returncode:
        sys.exit("setup: a package is missing in .venv-triton, see above; run `make clean` and try again")
    (VENV / ".complete").touch()


if __name__ == "__main__":
    if not sys.platform.startswith("linux"):
        sys.exit(f"setup: triton supports only Linux, and this is {sys.platform}")
    install()
