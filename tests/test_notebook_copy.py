"""make notebook: a copy of one's own is opened, from which all imports work; nothing committed is written to."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from notebooks import lab
from tests.helpers import ROOT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A notebooks folder inside a repository."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    (tmp_path / "stages").mkdir()
    for name in ("s3_paged_attention", "s30_other", "claims"):
        (folder / f"{name}.ipynb").write_text(name)
    return folder


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands in whose place this process would go on."""
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, command: commands.append([program, *command[1:]]))
    return commands


@pytest.mark.parametrize("name", ["3", "s3", "s3_paged_attention"])
def test_a_copy_is_opened_in_jupyter_lab(folder, opened, name):
    lab.main([name, "--no-browser"], folder)
    mine = folder / "mine" / "s3_paged_attention.ipynb"
    assert opened == [[sys.executable, "-m", "jupyter", "lab", str(mine), "--no-browser"]]
    assert mine.read_text() == "s3_paged_attention"


def test_a_copy_that_is_there_stays_as_it_was_left(folder, opened, capsys):
    lab.main(["claims"], folder)
    (folder / "mine" / "claims.ipynb").write_text("changed")
    lab.main(["claims"], folder)
    assert (folder / "mine" / "claims.ipynb").read_text() == "changed" and len(opened) == 2
    assert (folder / "claims.ipynb").read_text() == "claims"
    assert "is as you left it (delete it to begin anew)" in capsys.readouterr().out


def test_no_notebook_is_one_line(folder, opened, capsys):
    assert lab.main(["9"], folder) == lab.main([], folder) == 2
    assert "there is no notebook '9'; there are: claims, s30_other, s3_paged_attention\n" in capsys.readouterr().err
    assert opened == [] and not (folder / "mine").exists()


def test_the_copies_are_ignored_by_git():
    assert "/notebooks/mine/" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("notebook", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_copy_finds_the_repository_from_its_folder(notebook, tmp_path, monkeypatch):
    """Each begins by looking for it, from the folder that jupyter starts it in upward."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    source = "".join(next("".join(cell["source"]) for cell in cells if "ROOT = " in "".join(cell["source"])))
    (find_root,) = [line for line in source.splitlines() if line.startswith("ROOT = ")]
    (tmp_path / "stages").mkdir()
    (tmp_path / "notebooks" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "notebooks" / "mine")
    names: dict[str, object] = {"Path": Path}
    exec(find_root, names)
    assert names["ROOT"] == tmp_path


@pytest.mark.full
def test_jupyter_lab_is_what_the_command_opens(tmp_path):
    """With --version jupyter lab says it, and ends."""
    pytest.importorskip("jupyterlab")
    program = (
        f"from pathlib import Path; from notebooks import lab; lab.main(['s1', '--version'], Path({str(tmp_path)!r}))"
    )
    (tmp_path / "s1_a.ipynb").write_text("{}")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[-1].split(".")[0].isdigit(), done.stderr
