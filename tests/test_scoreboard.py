"""Every stage is measured and asked, and its numbers get where its lesson takes them from."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

from stages import path, predict, scoreboard, tables
from stages.chaintools import load
from stages.path import EFFECTS
from tests.helpers import ROOT

STAGES = [stage for stage in load(ROOT).stages if stage.key.startswith("s")]
each_stage = pytest.mark.parametrize("stage", STAGES, ids=[stage.key for stage in STAGES])


@each_stage
def test_a_stage_is_measured_and_asked(stage):
    assert stage.key in predict.stages(), "stages/predict has no file for it"
    assert stage.key in EFFECTS, "stages/path.py does not say what it brought"
    assert [v for v in scoreboard.VARIANTS if v.label.startswith(f"{stage.key},") and v.package.endswith(stage.name)]


@each_stage
def test_a_lesson_shows_its_answers_and_its_scoreboard(stage):
    blocks = re.findall(r"<!-- figures: (\w+) -->", (stage.folder / "README.md").read_text(encoding="utf-8"))
    assert {f"answers_{stage.key}", f"scoreboard_{stage.key}"} <= {*blocks}


def test_stages_are_asked_in_order(monkeypatch, tmp_path):
    for name in ("s10.py", "s2.py", "s1.py", "common.py", "stale.py"):
        (tmp_path / name).touch()
    monkeypatch.setattr(predict, "__file__", str(Path(tmp_path, "__init__.py")))
    assert predict.stages() == ["s1", "s2", "s10"]


def test_the_path_has_lessons_only():
    """The finished package is a link of the chain, and no stage."""
    assert [stage.key for stage in path.lessons()] == [stage.key for stage in STAGES]


def test_the_screen_is_what_make_run_shows(monkeypatch):
    def run(arguments):
        print("A story.  [2 tokens, length]\n\nAnother.  [2 tokens, length]\n\n\n9 tokens/s")

    monkeypatch.setattr("nanovllm.__main__.main", lambda arguments: told.append(arguments) or run(arguments))
    told = []
    assert scoreboard.screen() == {"screen": "A story.  [2 tokens, length]\n\n...\n\n9 tokens/s"}
    assert told == [["generate", "--model", str(scoreboard.MODEL)]]


def test_figures_of_two_machines_are_not_mixed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(scoreboard.figures, "ROOT", tmp_path)
    path = tmp_path / scoreboard.figures.RESULTS
    path.parent.mkdir()
    old = {"machine": "a large one", "peers": {"ratio": 1}, "run": {}}
    path.write_text(json.dumps(old))
    scoreboard.save({"machine": "a small one", "peers": {"ratio": 3}})
    assert json.loads(path.read_text()) == old
    assert "measured on a large one, and this is a small one" in capsys.readouterr().err
    monkeypatch.setattr(scoreboard.figures, "write", lambda: [])
    scoreboard.save({"machine": "a large one", "peers": {"ratio": 3}})
    assert json.loads(path.read_text()) == old | {"peers": {"ratio": 3}}


def test_a_part_that_names_its_own_machine_may_be_from_any(monkeypatch, tmp_path):
    """And it does not stand in the way of the others, if all of those are measured together."""
    monkeypatch.setattr(scoreboard.figures, "ROOT", tmp_path)
    monkeypatch.setattr(scoreboard.figures, "write", lambda: [])
    path = tmp_path / scoreboard.figures.RESULTS
    path.parent.mkdir()
    path.write_text('{"machine": "a large one", "run": {}}')
    serving = {"machine": "a small one", "ratio": 2}
    scoreboard.save({"serving": serving})
    assert json.loads(path.read_text()) == {"machine": "a large one", "run": {}, "serving": serving}
    scoreboard.save({"machine": "another", "run": {"screen": ""}})
    assert json.loads(path.read_text()) == {"machine": "another", "run": {"screen": ""}, "serving": serving}


def test_a_table_has_the_columns_that_a_row_has():
    rows = {"s1, a": {"seats": 3, "steps": 1200}, "s2, b": {"seats": 4}}
    assert tables.score_table(rows).splitlines() == [
        "| stage | seats | steps |",
        "|---|---|---|",
        "| s1, a | 3 | 1,200 |",
        "| s2, b | 4 | - |",
    ]


def test_a_lesson_compares_with_the_stage_before():
    results = {"scoreboard": {name: {"seats": 1} for name in ("s1, a", "s1, b", "s2, c", "s3, d", "s21, e")}}
    rows = tables.scoreboard_of(2)(results).splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == ["s1, a", "s1, b", "s2, c"]
