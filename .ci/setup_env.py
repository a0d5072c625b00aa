"""Make .venv and install an extra of pyproject.toml into it, for the Makefile: `python3 .ci/setup_env.py core|test|...`

.venv is made from the interpreter that runs this, with the standard library alone: nothing is installed yet.

- torch: one >= 2.11 that this interpreter imports already is used as it is. Otherwise the build that constraints.txt
  pins; if $TORCH_INDEX is set, torch alone comes from there.
- installer: uv if there is one, unless pip was told where packages come from: uv does not read pip's settings.
- numba: it compiles the finished engine's kernels. Where it has no wheel for this Python the engine does without.
- stamp: .venv/.with-EXTRA comes last, so an install that fails or is interrupted leaves none and the next one goes on.
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
    sys.exit(f"nanovllm needs Python 3.11 or newer, and {sys.executable} is {platform.python_version()}")
import tomllib

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
TORCH_INDEX = os.environ.get("TORCH_INDEX", "")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
STOPPED = "setup: stopped, see above; the same make goes on from here"
PROGRESS = re.compile(r"Progress (\d+) of (\d+)")  # pip's --progress-bar raw, in bytes
FETCHED = re.compile(r" *(?:Downloading|Using cached|Processing) (\S+\.(?:whl|tar\.gz))(?!\S)(?: \((?!from)(.+)\))?")
MEGABYTES = {"core": 35, "serve": 1, "test": 125, "lint": 30, "notebooks": 65}  # to download, torch aside


class Torch(NamedTuple):
    version: str
    folder: Path  # where it is installed: a site-packages

    def is_borrowed(self) -> bool:
        return not self.folder.is_relative_to(VENV)


def ask(python: Path | str, code: str) -> str | None:
    """What `python -c code` prints; None if it fails or there is no such python."""
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=ROOT)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def do(*command: Path | str) -> None:
    """Run a command in sight of the user; end here if it fails."""
    if subprocess.run(command, cwd=ROOT).returncode:
        sys.exit(STOPPED)


def attempt(*command: Path | str) -> bool:
    """Run a command out of sight; returns whether it succeeded."""
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


def do_pip(*command: Path | str) -> None:
    """Run pip and print a line for each package that it fetches; if it fails, print all that it said, and end here."""
    version = ask(PYTHON, "import pip; print(pip.__version__)") or "0"
    bar = ["--progress-bar", "raw"] if release_of(version) >= (24, 1) else []  # what older ones can, no pipe sees
    said: list[str] = []
    with subprocess.Popen(
        [*command, *bar, "--disable-pip-version-check"],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as pip:
        for line in pip.stdout:
            said.append(line)
            print(in_short(line), end="", flush=True)
    if pip.returncode:
        print("".join(line for line in said if not PROGRESS.match(line)))
        sys.exit(STOPPED)


def in_short(line: str) -> str:
    """What to print for a line of pip's: a package, how much of it has come (on a terminal), or nothing.

    >>> in_short("  Downloading click-8.5.1-py3-none-any.whl (126 kB)")
    '  click 8.5.1, 126 kB\\n'
    >>> in_short("Collecting pluggy<2,>=1.6 (from pytest)")
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
    return "installing them\n" if line.startswith("Installing collected packages") else ""


def release_of(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def find_torch(python: Path | str) -> Torch | None:
    """The torch >= 2.11 that `python` imports."""
    answer = ask(python, "import torch; print(torch.__version__, torch.__file__, sep='\\n')")
    if answer is None:
        return None
    version, file = answer.splitlines()[-2:]
    return Torch(version, Path(file).parent.parent) if release_of(version) >= (2, 11) else None


def pip_settings() -> list[str]:
    """Which of find-links, index-url and no-index pip was told, in its files or by the environment."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    return re.findall(r"(find-links|index-url|no-index)=", listed)


def make_venv(with_pip: bool) -> None:
    """.venv from this interpreter, whose packages it sees if torch is among them."""
    torch = find_torch(sys.executable)
    print(f"Making .venv with {sys.executable} (Python {platform.python_version()})", flush=True)
    shutil.rmtree(VENV, ignore_errors=True)
    flags = ([] if with_pip else ["--without-pip"]) + (["--system-site-packages"] if torch else [])
    do(sys.executable, "-m", "venv", *flags, VENV)
    if torch and not find_torch(PYTHON):  # this interpreter is a virtual environment's: .venv sees only the one below
        site_packages = ask(PYTHON, "import sysconfig; print(sysconfig.get_path('purelib'))")
        Path(site_packages or VENV, "torch_is_there.pth").write_text(f"{torch.folder}\n")


def describe(torch: Torch | None, pin: str) -> str:
    """Which torch it will be, and how big that is."""
    if torch:
        return f"torch {torch.version} is there already, in {torch.folder}"
    if TORCH_INDEX:
        return f"torch {pin} comes from {TORCH_INDEX} (a CPU build is about 200 MB)"
    if "find-links" in pip_settings():
        return f"torch {pin} comes from pip's find-links if they have it (a CPU build is about 200 MB)"
    if sys.platform != "linux":
        return f"torch {pin} is about 110 MB"
    return (
        f"torch {pin} with CUDA is about 2.7 GB. No NVIDIA GPU? Stop this (Ctrl-C) and take the CPU build of 200 MB:\n"
        f"  make run TORCH_INDEX={CPU_INDEX}"
    )


def install_kernels(pip: list[Path | str], requirements: list[str]) -> None:
    """Numba, unless it is there or has no wheel: it is never built, and nothing waits for it."""
    if ask(PYTHON, "import numba") is not None:
        return
    print(f"Adding {', '.join(requirements)}, for compiled kernels (about 65 MB)", flush=True)
    if not attempt(*pip, "--only-binary", ":all:", *requirements):
        print(f"There is none for Python {platform.python_version()} here: the engine runs on plain operations")


def install(extra: str) -> None:
    """What `extra` needs, and the core, into .venv; then the stamps."""
    uv = None if pip_settings() else shutil.which("uv")
    if ask(PYTHON, "import sys" if uv else "import pip") is None:
        make_venv(with_pip=not uv)
    pin = (ROOT / "constraints.txt").read_text().split("torch==")[1].split()[0]
    torch = find_torch(PYTHON)
    if torch and not torch.is_borrowed() and torch.version.split("+")[0] != pin:
        torch = None  # of an older pin: to be replaced

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs: dict[str, list[str]] = {"core": project["dependencies"], **project["optional-dependencies"]}
    names = list(dict.fromkeys(["core", extra]))
    new = [name for name in names if name == extra or not (VENV / f".with-{name}").exists()]
    small = {name: [each for each in needs[name] if not each.startswith("torch>")] for name in names}
    listed = ", ".join(re.split("[<>=]", each)[0] for name in new for each in small[name])
    print(f"Installing with {'uv' if uv else 'pip'} (about {sum(MEGABYTES[n] for n in new)} MB to download): {listed}")
    print(describe(torch, pin), flush=True)

    pip: list[Path | str] = [uv, "pip", "install", "--python", PYTHON] if uv else [PYTHON, "-m", "pip", "install"]
    build = [] if torch and torch.is_borrowed() else ["torch", "-c", "constraints.txt"]
    run = do if uv else do_pip
    if TORCH_INDEX and not torch:
        run(*pip, "--no-deps", "--index-url", TORCH_INDEX, *build)
    run(*pip, *build, *(each for name in names for each in small[name]))
    if not find_torch(PYTHON):
        sys.exit("setup: all is installed, but .venv cannot import torch >= 2.11; `make clean`, then again")
    install_kernels(pip, needs["kernels"])
    for name in names:
        (VENV / f".with-{name}").touch()


if __name__ == "__main__":
    if Path(sys.prefix).resolve() == VENV.resolve():  # .venv is active: step off the branch before it may be cut
        os.execv(sys._base_executable, [sys._base_executable, *sys.argv])
    try:
        install(sys.argv[1])
    except KeyboardInterrupt:
        sys.exit("\nsetup: interrupted; the same make goes on from here")
