"""nanovllm batch --resume: what an interrupted run has written stays, and nothing is lost or served twice."""

import json
import signal

import pytest

from .. import LLMEngine
from ..cli import results_file
from .test_batch import FOUR, FullDisk, write

SAMPLED = {"temperature": 1.0, "max_tokens": 6, "ignore_eos": True}
FLAGS = ("--max-num-seqs", "2")
OPENAI = {"method": "POST", "url": "/v1/completions"}


@pytest.fixture
def asked(tmp_path):
    """Requests of both forms, without seeds, of different lengths."""
    own = [{"id": f"r{i}", "prompt": "the fox", **SAMPLED, "max_tokens": 2 + i % 5, "n": 1 + i % 2} for i in range(12)]
    others = [{"custom_id": f"c{i}", **OPENAI, "body": {"prompt": "the wood", **SAMPLED}} for i in range(3)]
    return write(tmp_path / "asked.jsonl", *own, *others)


def answers(path) -> dict[str, list]:
    """What was generated, by id; each id once."""
    results = [json.loads(line) for line in path.read_text().splitlines()]
    told = {
        result.get("custom_id", result["id"]): (
            [output["token_ids"] for output in result["outputs"]]
            if "outputs" in result
            else [choice["text"] for choice in result["response"]["body"]["choices"]]
        )
        for result in results
    }
    assert len(told) == len(results)
    return told


def interrupt_at(monkeypatch, number: int) -> None:
    step, calls = LLMEngine.step, iter(range(1, 1000))

    def interrupted(engine):
        if next(calls) == number:
            signal.raise_signal(signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(LLMEngine, "step", interrupted)


def test_a_run_that_is_interrupted_and_resumed_has_the_results_of_one_that_was_not(run, asked, tmp_path, monkeypatch):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert run("batch", str(asked), "--output", str(whole), *FLAGS)[0] == 0
    for number in (6, 9):
        with monkeypatch.context() as context:
            interrupt_at(context, number)
            assert run("batch", str(asked), "--output", str(out), "--resume", *FLAGS)[0] == 130
        with out.open("a") as stream:
            stream.write('{"id": "r11", "ind')  # as a power cut leaves it
    some = answers_before(out)
    assert 2 <= len(some) <= 12
    status, _, err = run("batch", str(asked), "--output", str(out), "--resume", *FLAGS)
    assert status == 0 and f"{15 - len(some)} requests, 0 failed" in err and f"; {len(some)} were there already" in err
    assert answers(out) == answers(whole) and len(answers(out)) == 15
    assert out.read_text().startswith("".join(some)), "what was there is as it was"


def answers_before(path) -> list[str]:
    """The whole lines."""
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def test_a_full_disk_leaves_whole_lines_and_the_rest_is_served_later(run, asked, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    with monkeypatch.context() as context:
        context.setattr(FullDisk, "ROOM", 900)
        context.setattr(results_file, "open", lambda path, *_, **__: FullDisk(path, "x"), raising=False)
        assert run("batch", str(asked), "--output", str(out), *FLAGS)[::2] == (
            1,
            "error: [Errno 28] No space left on device\n",
        )
    before = out.read_text()
    assert 0 < len(before) <= 900 and before.endswith("\n")
    assert run("batch", str(asked), "--output", str(out), "--resume", *FLAGS)[0] == 0
    assert len(answers(out)) == 15 and out.read_text().startswith(before)


def test_when_all_is_done_there_is_nothing_to_do(run, asked, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    assert run("batch", str(asked), "--output", str(out), "--resume")[0] == 0, "a first run may say --resume too"
    before = out.read_bytes()
    monkeypatch.setattr(LLMEngine, "__init__", lambda *_: pytest.fail("an engine was built"))
    says = f"nothing to do: {out} has the results of all 15 requests\n"
    assert run("batch", str(asked), "--output", str(out), "--resume") == (0, "", says)
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("there", "says"),
    [
        ('{"id": "other", "outputs": []}\n', "line 1: there is no request 'other': it is another file's result"),
        ('{"id": "r0"}\nnot JSON\n', "line 2: it is no result: remove the line, or use --overwrite"),
        ('{"id": "r0"}\n[]\n', "line 2: it is no result"),
        ('{"id": "r1", "prompt": "the wood"}\n', "line 1: request 'r1' has another prompt: it is another file's"),
        ('{"index": 0}\n', "line 1: it is no result"),
        ("\0\0\0\n", "line 1: it is no result"),
    ],
)
def test_what_is_not_a_result_of_this_file_is_told_and_stays(run, asked, tmp_path, there, says):
    out = tmp_path / "out.jsonl"
    out.write_text(there)
    status, _, err = run("batch", str(asked), "--output", str(out), "--resume")
    assert status == 2 and err.startswith(f"error: {out}, {says}") and err.count("\n") == 1
    assert out.read_text() == there


def test_two_results_of_one_request_are_not_two_requests_done(run, asked, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text('{"id": "r0"}\n' * 15)
    says = f"error: {out} has 15 results, some of them of the same request: use --overwrite\n"
    assert run("batch", str(asked), "--output", str(out), "--resume") == (2, "", says)


def test_a_file_is_repaired_only_when_the_engine_is_there(run, asked, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text('{"id": "r0"}\n{"id": "r1", ')
    assert run("batch", str(asked), "--output", str(out), "--resume", "--block-size", "0")[0] == 2
    assert out.read_text() == '{"id": "r0"}\n{"id": "r1", '


@pytest.mark.parametrize("flags", [[], ["--output", "x", "--overwrite"]], ids=["stdout", "overwrite"])
def test_resume_needs_a_file_and_not_to_overwrite_it(run, asked, flags):
    says = "error: --resume needs --output, and no --overwrite: it goes on in a file of results\n"
    assert run("batch", str(asked), "--resume", *flags) == (2, "", says)


@pytest.mark.parametrize("output", ["/dev/null", "."])
def test_what_is_no_file_cannot_be_gone_on_in(run, asked, output, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    says = f"error: {output} is no file that can be gone on in\n"
    assert run("batch", str(asked), "--resume", "--output", output) == (2, "", says)


def test_requests_that_failed_are_not_served_again(run, tmp_path):
    asked, out = write(tmp_path / "a.jsonl", {"prompt": ""}, {"prompt": "the", **FOUR}), tmp_path / "out.jsonl"
    assert run("batch", str(asked), "--output", str(out))[0] == 1
    assert run("batch", str(asked), "--output", str(out), "--resume")[0] == 0
    assert len(out.read_text().splitlines()) == 2
