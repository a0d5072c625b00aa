"""Every stage is on the scoreboard and has questions, and its lesson shows them."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

from stages.bench import predict, scoreboard
from stages.bench.engines import PACKAGES
from stages.tools.chain import load
from stages.tools.prose import ideas, tables
from tests.helpers import ROOT, full

STAGES = [stage for stage in load(ROOT).stages if stage.key.startswith("s")]
LAST = "s7, host pool"  # the other rows run in the long part
each_stage = pytest.mark.parametrize("stage", STAGES, ids=[stage.key for stage in STAGES])


@each_stage
def test_stage_is_measured_and_has_questions(stage):
    assert PACKAGES[stage.key] == stage.name
    assert Path(predict.__file__).with_name(f"{stage.key}.py").exists(), "stages/bench/predict has no file for it"
    assert stage.key in map(scoreboard.stage_of, scoreboard.VARIANTS)


@each_stage
def test_lesson_shows_its_answers_and_its_scoreboard(stage):
    blocks = re.findall(r"<!-- figures: (\w+) -->", (stage.folder / "README.md").read_text(encoding="utf-8"))
    assert {f"answers_{stage.key}", f"scoreboard_{stage.key}"} <= {*blocks}


@pytest.mark.parametrize("label", [label if label == LAST else full(label) for label in scoreboard.VARIANTS])
def test_row_has_the_counts_of_its_stage(label):
    row = scoreboard.row_of(label, scoreboard.serve([label], num_requests=1)[label])
    prompt, output = 232, 114  # the first request of the mixed workload
    assert (row["seats"], row["steps"], row["tokens_computed"]) == (1, output, prompt + output - 1)
    assert 0 < row["first_token_seconds"] < output / row["tokens_per_second"]
    assert (
        row["promised_bytes"] >= row["used_bytes"] > 0 and row["held_bytes"] == row["used_bytes"] + row["wasted_bytes"]
    )
    assert ("blocks_copied" in row) == (label >= "s5") and ("blocks_loaded" in row) == label.startswith("s7")


def test_each_stage_has_a_lesson_and_the_package_has_none():
    """The package is a link of the chain, but not a stage."""
    assert [stage.key for stage in ideas.lessons()] == [stage.key for stage in STAGES]


def test_screen_shows_make_run(monkeypatch):
    def run(arguments):
        calls.append(arguments)
        print("A story of a fox, and of a hen. " * 9 + " [2 tokens, length]\n\n\n9 tokens/s, half the pool")

    monkeypatch.setattr("stages.__main__.main", run)
    calls = []
    result = scoreboard.measure_run(None)["run"]
    screen, model = result["screen"].splitlines(), ["--model", str(scoreboard.STORYTELLER)]
    stories, others = calls[-4:], calls[:-4]
    assert stories == [[number, *model, "Once upon a time"] for number in "1122"]
    assert screen[0] == '$ make run STAGE=1 PROMPT="Once upon a time"' and screen[4] == screen[0].replace("1", "2")
    assert screen[1].startswith("A story of a fox") and screen[1].endswith("hen.  [2 tokens, length]")
    assert len(screen[1]) <= scoreboard.STORY_WIDTH + len(" ... ")
    assert screen[2:4] == ["9 tokens/s, half the pool", ""]
    assert ["4", *model, "--kv-cache-tokens", "256", "--max-model-len", "256"] in others
    assert ["5", *model, "--n", "4", f"{scoreboard.KING} youngest"] in others, "a prompt in quotes is one argument"
    small = "$ python -m stages 4 --kv-cache-tokens 256 --max-model-len 256\n...\n9 tokens/s, half the pool"
    assert result["lessons"]["s4"].endswith(small) and small in tables.BLOCKS["run_s4"]({"run": result})


# Tables in prose


def test_table_has_the_columns_of_its_rows():
    rows = {"s1, a": {"seats": 3, "steps": 1200}, "s2, b": {"seats": 4}}
    assert tables.scoreboard_block({"scoreboard": rows}).splitlines() == [
        "| stage | seats | steps |",
        "|---|---|---|",
        "| s1, a | 3 | 1,200 |",
        "| s2, b | 4 | - |",
    ]


def test_lesson_compares_with_the_previous_stage():
    result = {"scoreboard": {name: {"seats": 1} for name in ("s1, a", "s1, b", "s2, c", "s3, d", "s21, e")}}
    rows = tables.scoreboard_of(2)(result).splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == ["s1, a", "s1, b", "s2, c"]


def test_tables_of_a_lesson_are_narrow():
    result = {"scoreboard": {"s4, a": {column.key: 1 for column in tables.SCORES}}}
    parts = tables.scoreboard_of(4)(result).split("\n\n")
    assert [part.splitlines()[0].count("|") - 1 for part in parts] == [6, 5, 4]


@pytest.mark.parametrize("name", ["scarce_samples_s6", "offload", "run_s4"])
def test_table_without_results_says_so(name):
    assert tables.BLOCKS[name]({}) == "Not measured yet.\n"
