"""Make .venv and install an extra of pyproject.toml, for the Makefile: `python3 .ci/setup_env.py core|test|...`.

It uses only the standard library, because nothing is installed yet. .venv is based on the interpreter that runs this.

- versions: constraints.txt pins all packages. `make pins` moves its versions.
- torch: if this interpreter can import torch 2.11 or newer, .venv uses that one, whatever the pin. $TORCH_INDEX sets
  the package index for torch alone.
- installer: uv if available, unless pip is configured with its own package sources, which uv doesn't read.
- numba: it compiles the package's CPU kernels. If this Python has no wheel, the package runs without it.
- stamp: .venv/.with-EXTRA is written last, so the next run continues an install that failed or was interrupted.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"setup: nanovllm needs Python 3.11 or newer, and {sys.executable} is {platform.python_version()}")
import tomllib

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
TORCH_INDEX = os.environ.get("TORCH_INDEX", "")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
FAILED = "setup: failed, see above; run the same make command to continue"
PROGRESS = re.compile(r"Progress (\d+) of (\d+)")  # pip's --progress-bar raw, in bytes
FETCHED = re.compile(r" *(?:Downloading|Using cached|Processing) (\S+\.(?:whl|tar\.gz))(?!\S)(?: \((?!from)(.+)\))?")
# to download, without torch
MEGABYTES = {"core": 35, "gguf": 1, "serve": 4, "test": 125, "lint": 30, "notebooks": 65, "book": 25, "mutants": 5}


class Torch(NamedTuple):
    """An installed torch."""

    version: str
    folder: Path  # the site-packages that it is installed in

    def is_borrowed(self) -> bool:
        return not self.folder.is_relative_to(VENV)


def query(python: Path | str, code: str) -> str | None:
    """Return the output of `python -c code`, or None if it fails or `python` doesn't exist."""
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=ROOT)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def run(*command: Path | str) -> None:
    """Run a command and show its output. Exit if it fails."""
    if subprocess.run(command, cwd=ROOT).returncode:
        sys.exit(FAILED)


def succeeds(*command: Path | str) -> bool:
    """Run a command quietly, and return whether it succeeded."""
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


def run_pip(*command: Path | str) -> None:
    """Run pip, and print one line for each package it fetches. If it fails, print its whole output and exit."""
    version = query(PYTHON, "import pip; print(pip.__version__)") or "0"
    bar = ["--progress-bar", "raw"] if release_of(version) >= (24, 1) else []  # older versions hide their bar in pipes
    output: list[str] = []
    with subprocess.Popen(
        [*command, *bar, "--disable-pip-version-check"],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as pip:
        assert pip.stdout is not None, "a pipe"
        for line in pip.stdout:
            output.append(line)
            print(summarize(line), end="", flush=True)
    if pip.returncode:
        print("".join(line for line in output if not PROGRESS.match(line)))
        sys.exit(FAILED)


def summarize(line: str) -> str:
    r"""Return the text to print for a line of pip's: a package, its progress (on a terminal), or nothing.

    >>> summarize("  Downloading click-8.5.1-py3-none-any.whl (126 kB)")
    '  click 8.5.1, 126 kB\n'
    >>> summarize("Collecting pluggy<2,>=1.6 (from pytest)")
    ''
    """
    if match := PROGRESS.match(line):
        arrived, size = int(match[1]), int(match[2])
        if not sys.stdout.isatty() or not size:
            return ""
        return f"\r    {arrived / size:4.0%}" if arrived < size else "\r        \r"
    if match := FETCHED.match(line):
        name, version = unquote(Path(match[1]).name).removesuffix(".tar.gz").split("-")[:2]
        return f"  {name} {version}" + (f", {match[2]}" if match[2] else "") + "\n"
    return "installing...\n" if line.startswith("Installing collected packages") else ""


def release_of(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def find_torch(python: Path | str) -> Torch | None:
    """Return the torch that `python` imports, or None if there is none or it is older than 2.11."""
    answer = query(python, "import torch; print(torch.__version__, torch.__file__, sep='\\n')")
    if answer is None:
        return None
    version, file = answer.splitlines()[-2:]
    return Torch(version, Path(file).parent.parent) if release_of(version) >= (2, 11) else None


def pip_settings() -> list[str]:
    """Return which of find-links, index-url and no-index pip's files or environment variables set."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    return re.findall(r"(find-links|index-url|no-index)=", listed)


def make_venv(with_pip: bool) -> None:
    """Make .venv from this interpreter. It shares the interpreter's packages if torch is one of them."""
    torch = find_torch(sys.executable)
    print(f"Making .venv with {sys.executable} (Python {platform.python_version()})", flush=True)
    shutil.rmtree(VENV, ignore_errors=True)
    flags = ([] if with_pip else ["--without-pip"]) + (["--system-site-packages"] if torch else [])
    run(sys.executable, "-m", "venv", *flags, VENV)
    if torch and not find_torch(PYTHON):  # .venv sees the base interpreter's packages, not a parent venv's
        site_packages = query(PYTHON, "import sysconfig; print(sysconfig.get_path('purelib'))")
        Path(site_packages or VENV, "borrowed_torch.pth").write_text(f"{torch.folder}\n")


def describe(torch: Torch | None, pin: str) -> str:
    """Return a line about the torch to install: its source and its size."""
    if torch:
        return f"torch {torch.version} is already installed, in {torch.folder}"
    if TORCH_INDEX:
        return f"torch {pin} comes from {TORCH_INDEX} (a CPU build is about 200 MB)"
    if "find-links" in pip_settings():
        return f"torch {pin} comes from pip's find-links if available there (a CPU build is about 200 MB)"
    if sys.platform != "linux":
        return f"torch {pin} is about 110 MB"
    return (
        f"torch {pin} with CUDA is about 2.7 GB. No NVIDIA GPU? Press Ctrl-C and take the CPU build (200 MB):\n"
        f"  make run TORCH_INDEX={CPU_INDEX}"
    )


def write_pins(with_torch: bool) -> Path:
    """Write the constraints for this install into .venv, with or without torch's pin, and return the file."""
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    file = VENV / "constraints.txt"
    file.write_text("".join(line for line in lines if with_torch or not line.startswith("torch==")))
    return file


def install_kernels(pip: list[Path | str], requirements: list[str]) -> None:
    """Install Numba if it is missing and has a wheel. It is never built from source, and a failure is not an error."""
    if query(PYTHON, "import numba") is not None:
        return
    print(f"Adding {', '.join(requirements)} to compile kernels (about 65 MB)", flush=True)
    if not succeeds(*pip, "--only-binary", ":all:", *requirements):
        print(f"There is no wheel for Python {platform.python_version()}: the package will use plain operations")


def install(extra: str) -> None:
    """Install the core and `extra` into .venv, then write the stamps."""
    uv = None if pip_settings() else shutil.which("uv")
    if query(PYTHON, "import sys" if uv else "import pip") is None:
        make_venv(with_pip=not uv)
    pin = (ROOT / "constraints.txt").read_text().split("\ntorch==")[1].split()[0]
    torch = find_torch(PYTHON)
    if torch and not torch.is_borrowed() and torch.version.split("+")[0] != pin:
        torch = None  # an older pin, to be replaced

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs: dict[str, list[str]] = {"core": project["dependencies"], **project["optional-dependencies"]}
    names = list(dict.fromkeys(["core", extra]))
    new = [name for name in names if name == extra or not (VENV / f".with-{name}").exists()]
    small = {name: [each for each in needs[name] if not each.startswith("torch>")] for name in names}
    listed = ", ".join(re.split("[<>=]", each)[0] for name in new for each in small[name])
    print(f"Installing with {'uv' if uv else 'pip'} (about {sum(MEGABYTES[n] for n in new)} MB to download): {listed}")
    print(describe(torch, pin), flush=True)

    pip: list[Path | str] = [uv, "pip", "install", "--python", PYTHON] if uv else [PYTHON, "-m", "pip", "install"]
    is_borrowed = torch is not None and torch.is_borrowed()
    pip += ["-c", write_pins(with_torch=not is_borrowed)]
    build = [] if is_borrowed else ["torch"]
    run_install = run if uv else run_pip
    if TORCH_INDEX and not torch:
        run_install(*pip, "--no-deps", "--index-url", TORCH_INDEX, *build)
    run_install(*pip, *build, *(each for name in names for each in small[name]))
    if not find_torch(PYTHON):
        sys.exit("setup: .venv can't import torch >= 2.11 after the install; run `make clean` and try again")
    install_kernels(pip, needs["kernels"])
    for name in names:
        (VENV / f".with-{name}").touch()


if __name__ == "__main__":
    if Path(sys.prefix).resolve() == VENV.resolve():  # .venv is active, and may be removed
        python: str = getattr(sys, "_base_executable", sys.executable)
        os.execv(python, [python, *sys.argv])
    try:
        install(sys.argv[1])
    except KeyboardInterrupt:
        sys.exit("\nsetup: interrupted; run the same make command to continue")
