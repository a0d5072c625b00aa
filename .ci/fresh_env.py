"""Fresh virtual environments outside the repository, for the checks that .ci/nightly runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def torch_pin() -> str:
    """Return the version of torch that constraints.txt names."""
    return (ROOT / "constraints.txt").read_text(encoding="utf-8").split("\ntorch==")[1].split()[0]


def torch_index(python: str | Path = sys.executable) -> str:
    """Return the package index for torch alone, or nothing if pip is configured with a folder of wheels."""
    configured = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    return "" if re.search("find-links|no-index", configured) else os.environ.get("TORCH_INDEX", CPU_INDEX)


class Environment:
    """A virtual environment with nanovllm's dependencies."""

    def __init__(self, folder: Path) -> None:
        """Create it in `folder`, which must be empty."""
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        self.folder, self.python = folder, folder / "bin" / "python"

    def pip(self, *arguments: str | Path) -> None:
        """Run pip install outside the repository. Raise CalledProcessError if it fails."""
        command = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
        subprocess.run(command, cwd=self.folder, check=True)

    def pins(self, *unpinned: str) -> Path:
        """Write constraints.txt without these packages into the environment, and return the file."""
        lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
        file = self.folder / "constraints.txt"
        file.write_text("".join(line for line in lines if line.split("==")[0] not in unpinned), encoding="utf-8")
        return file

    def borrow(self) -> None:
        """Let it import the packages of the environment that runs this script. Packages of its own come first."""
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        own = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        borrowed = [path for path in sys.path if path.endswith("-packages")]
        Path(own, "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))

    def install_torch(self, version: str | None = None) -> None:
        """Install a version of torch, by default that of constraints.txt, from $TORCH_INDEX or PyTorch's CPU index.

        If pip is configured with a folder of wheels, torch comes from there.
        """
        index = torch_index(self.python)
        self.pip(*(["--index-url", index] if index else []), f"torch=={version or torch_pin()}")

    def variables(self) -> dict[str, str]:
        """Return environment variables that put its commands first, and hide the repository's modules."""
        paths = [str(self.folder / "bin"), os.environ["PATH"]]
        return {"PATH": os.pathsep.join(paths), "PYTHONPATH": "", "NANOVLLM_ATTENTION_BACKEND": "torch"}
