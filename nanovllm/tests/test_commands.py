"""What all commands share: where the checkpoint lies, and on which device; and the list of stages."""

import re
from pathlib import Path

import pytest

from .. import LLM
from ..cli.stages import STAGES, how_to_run
from ..log import tell
from .helpers import Terminal

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("command", ["generate", "batch", "chat", "bench latency"])
def test_a_name_of_the_hub_is_fetched_at_the_revision_that_is_asked_for(run, monkeypatch, tmp_path, command):
    def find(model, revision):
        asked.append((model, revision))
        raise ValueError("the hub cannot be reached")

    asked: list[tuple[str, str | None]] = []
    monkeypatch.setattr("nanovllm.checkpoints.hub.find_checkpoint", find)
    (tmp_path / "a.jsonl").write_text('{"prompt": "the"}')
    file = [str(tmp_path / "a.jsonl")] if command == "batch" else []
    for revision in ("v1", None):
        flags = ["--revision", revision] if revision else []
        ended = run(command, *file, *flags, model="org/name")
        assert ended == (2, "", "error: the hub cannot be reached\n")
    assert asked == [("org/name", "v1"), ("org/name", None)]


def test_a_device_that_is_not_given_is_the_engines_to_choose(run, monkeypatch):
    given = []
    make = LLM.__init__
    monkeypatch.setattr(LLM, "__init__", lambda llm, *args, **options: given.append(options) or make(llm, **options))
    assert run("generate", "the", "--max-tokens", "1")[0] == 0
    assert run("generate", "the", "--max-tokens", "1", "--device", "cpu")[0] == 0
    assert [options["device"] for options in given] == [None, "cpu"]


@pytest.mark.parametrize("device", ["gpu", "cuda:x"])
def test_a_device_that_there_is_not_is_told_in_one_line(run, tmp_path, device):
    (tmp_path / "a.jsonl").write_text('{"prompt": "the"}')
    status, out, err = run("batch", str(tmp_path / "a.jsonl"), "--device", device)
    assert (status, out) == (2, "") and err.startswith(f"error: device {device!r} is not to be had here: ")
    assert err.count("\n") == 1


def test_after_a_key_a_line_begins_anew_in_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    tell("interrupted", is_after_key=True)
    tell("a\nb")
    assert terminal.getvalue() == "\ninterrupted\na b\n"


def test_the_stages_fit_on_a_screen(capsys, monkeypatch):
    from ..__main__ import main

    monkeypatch.chdir(REPOSITORY)
    assert main(["stages"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and all(len(line) <= 100 for line in lines)
    assert len(STAGES) == 7 and [line[2] for line in lines if re.match(r"  \d  ", line)] == [*"1234567"]


def test_without_the_repository_it_says_where_they_are():
    assert how_to_run(None) == [
        "They are in the repository of this package, not in the package: there, python -m stages 1 runs one."
    ]
    assert how_to_run(Path("/elsewhere"))[0] == "  cd /elsewhere"


@pytest.mark.skipif(not (REPOSITORY / "stages").is_dir(), reason="the stages are in the repository, not in the package")
def test_the_names_are_those_of_the_folders():
    assert [*STAGES] == sorted(path.name for path in (REPOSITORY / "stages").glob("s[0-9]_*"))
