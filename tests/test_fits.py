"""`python -m stages.tools.fits`, which counts whether best fit admits more requests than first fit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stages.s1_contiguous_cache.kv_cache import PoolReport
from stages.tools import fits
from stages.tools.chain import load
from stages.tools.exercise.folder import copy_stage
from stages.tools.exercise.functions import find
from tests.helpers import ROOT

STAGE = load(ROOT).stage("s1")


@pytest.mark.full
def test_lesson_shows_what_the_command_prints_for_best_fit(tmp_path):
    """The best fit is the one that step 1's tests call wrong."""
    file, name = "slot_manager.py", "SlotManager._first_fit"
    variants = (ROOT / "tests/exercises/s1.py").read_text(encoding="utf-8")
    target, best_fit = find(STAGE.text(file), name), find(variants, f"Step1.wrong_is_best_fit.{name}")
    assert target and best_fit
    copy_stage(STAGE, tmp_path / "exercises/s1", {file: target.with_body(best_fit.body_at(target.indent))})
    command = [sys.executable, "-m", "stages.tools.fits", "exercises.s1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    shown = STAGE.text("README.md").split("$ python -m stages.tools.fits exercises.s1\n")[1].split("```")[0]
    assert shown == done.stdout


def test_missing_copy_is_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fits.main(["exercises.nobody"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("there is no exercises.nobody: make exercise STAGE=1 writes") and printed.count("\n") == 1


@pytest.mark.parametrize(
    "pieces, gaps",
    [
        ((), 1),
        (((0, 12, 3),), 0),
        (((0, 4, 4), (4, 4, 1)), 1),
        (((2, 4, 0), (6, 2, 0)), 2),
        (((2, 2, 0), (6, 2, 0)), 3),
    ],
)
def test_free_pieces_are_the_gaps_between_those_held(pieces, gaps):
    assert fits.num_free_pieces(PoolReport(12, promised=0, pieces=pieces, largest_free=0)) == gaps
