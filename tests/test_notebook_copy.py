"""make notebook opens a private copy without answers in which all imports work, and leaves the committed one alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from notebooks import lab
from tests.helpers import ROOT

CELLS = [  # kind, source: a picture, a question, its answer, the next section
    ("code", "import this"),
    ("markdown", "## 1. One\n\n**Predict:** Is it?"),
    ("code", "answer()"),
    ("markdown", "The lesson's number: 4."),
    ("code", "more()"),
]


def made(name: str) -> dict[str, Any]:
    """Return a notebook whose code cells have run."""
    run = {"outputs": [{"output_type": "display_data", "data": {"text/markdown": [name]}}], "execution_count": 1}
    cells = [{"cell_type": kind, "source": [source]} | (run if kind == "code" else {}) for kind, source in CELLS]
    return {"cells": cells, "nbformat": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create a notebooks folder in a repository."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    (tmp_path / "stages").mkdir()
    for name in ("s3_paged_attention", "s30_other", "claims"):
        (folder / f"{name}.ipynb").write_text(json.dumps(made(name)))
    return folder


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the commands that would replace this process."""
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, command: commands.append([program, *command[1:]]))
    return commands


@pytest.mark.parametrize("name", ["3", "s3", "s3_paged_attention"])
def test_copy_is_opened_in_jupyter_lab(folder, opened, name):
    lab.main([name, "--no-browser"], folder)
    mine = folder / "mine" / "s3_paged_attention.ipynb"
    assert opened == [[sys.executable, "-m", "jupyter", "lab", str(mine), "--no-browser"]]
    copy, original = (json.loads(path.read_text()) for path in (mine, folder / mine.name))
    assert original == made("s3_paged_attention")
    outputs = [cell.pop("outputs", None) for cell in copy["cells"]]
    assert outputs == [original["cells"][0]["outputs"], None, [], None, []], "answers are below the first prediction"
    assert [cell.pop("execution_count", None) for cell in copy["cells"]] == [1, None, None, None, None]
    assert [(cell["cell_type"], *cell["source"]) for cell in copy["cells"]] == CELLS and copy["nbformat"] == 4


def test_existing_copy_is_kept(folder, opened, capsys):
    lab.main(["claims"], folder)
    (folder / "mine" / "claims.ipynb").write_text("changed")
    lab.main(["claims"], folder)
    assert (folder / "mine" / "claims.ipynb").read_text() == "changed" and len(opened) == 2
    assert json.loads((folder / "claims.ipynb").read_text()) == made("claims")
    assert "is as you left it (delete it to start over)" in capsys.readouterr().out


def test_unknown_notebook_is_reported_in_one_line(folder, opened, capsys):
    assert lab.main(["9"], folder) == lab.main([], folder) == 2
    assert "there is no notebook '9'; there are: claims, s30_other, s3_paged_attention\n" in capsys.readouterr().err
    assert opened == [] and not (folder / "mine").exists()


def test_git_ignores_the_copies():
    assert "/notebooks/mine/" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("notebook", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_copy_finds_the_repository_from_its_folder(notebook, tmp_path, monkeypatch):
    """Each notebook first looks for the repository, upward from its own folder."""
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
def test_command_runs_jupyter_lab(tmp_path):
    """Jupyter Lab prints its version and exits, with --version."""
    pytest.importorskip("jupyterlab")
    program = (
        f"from pathlib import Path; from notebooks import lab; lab.main(['s1', '--version'], Path({str(tmp_path)!r}))"
    )
    (tmp_path / "s1_a.ipynb").write_text('{"cells": []}')
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[-1].split(".")[0].isdigit(), done.stderr
