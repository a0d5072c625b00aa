"""Make .venv-triton, where Triton's kernels are tested on the CPU: `.venv/bin/python .ci/setup_triton.py`.

It has two packages of its own: triton 3.6, and a numpy that Triton's interpreter works with. Everything else it sees in
the environment that runs this. That one is left as it is: a numpy of its own is what other packages want.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from setup_env import ROOT, ask, do, pip_settings

VENV = ROOT / ".venv-triton"
PYTHON = VENV / "bin" / "python"
PACKAGES = ["triton==3.6.*", "numpy<2.4"]  # from 2.4 on numpy makes no number of an array of one, the interpreter does


def install() -> None:
    """The environment, its packages, what it borrows; then the stamp, so that an interrupted install is done again."""
    print(f"Making .venv-triton (about 210 MB to download): {', '.join(PACKAGES)}", flush=True)
    shutil.rmtree(VENV, ignore_errors=True)
    uv = None if pip_settings() else shutil.which("uv")
    do(sys.executable, "-m", "venv", *(["--without-pip"] if uv else []), VENV)
    do(*([uv, "pip", "install", "--python", PYTHON] if uv else [PYTHON, "-m", "pip", "install"]), "--quiet", *PACKAGES)
    # Borrowed only now: pip would take the numpy there for installed. What is in .venv-triton itself is found first.
    own = ask(PYTHON, "import sysconfig; print(sysconfig.get_path('purelib'))")
    borrowed = [path for path in sys.path if path.endswith("-packages")]
    Path(own, "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))
    # In a process that shows its error
    if subprocess.run([PYTHON, "-c", "import triton, numpy, torch, pytest"], cwd=ROOT).returncode:
        sys.exit("setup: .venv-triton lacks a package, see above; `make clean`, then again")
    (VENV / ".complete").touch()


if __name__ == "__main__":
    if not sys.platform.startswith("linux"):
        sys.exit(f"setup: triton has packages for Linux alone, and this is {sys.platform}")
    install()
