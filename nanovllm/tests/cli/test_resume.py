"""nanovllm batch --resume: results of an interrupted run stay, and nothing is lost or served twice."""

import json
import signal

import pytest

from ... import LLMEngine
from ...cli import batch_files
from .test_batch import FOUR, FullDisk, write

SAMPLED = {"temperature": 1.0, "max_tokens": 6, "ignore_eos": True}
FLAGS = ("--max-num-seqs", "2")
OPENAI = {"method": "POST", "url": "/v1/completions"}


@pytest.fixture
def requests(tmp_path):
    """Write requests of both forms, without seeds, of different lengths."""
    own = [{"id": f"r{i}", "prompt": "the fox", **SAMPLED, "max_tokens": 2 + i % 5, "n": 1 + i % 2} for i in range(12)]
    others = [{"custom_id": f"c{i}", **OPENAI, "body": {"prompt": "the wood", **SAMPLED}} for i in range(3)]
    return write(tmp_path / "requests.jsonl", *own, *others)


def answers(path) -> dict[str, list]:
    """Return the outputs of a file of results by id. No id may occur twice."""
    results = [json.loads(line) for line in path.read_text().splitlines()]
    outputs = {
        result.get("custom_id", result["id"]): (
            [output["token_ids"] for output in result["outputs"]]
            if "outputs" in result
            else [choice["text"] for choice in result["response"]["body"]["choices"]]
        )
        for result in results
    }
    assert len(outputs) == len(results)
    return outputs


def interrupt_at(monkeypatch, number: int) -> None:
    step, calls = LLMEngine.step, iter(range(1, 1000))

    def interrupted(engine):
        if next(calls) == number:
            signal.raise_signal(signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(LLMEngine, "step", interrupted)


def test_resumed_run_has_the_same_results_as_an_uninterrupted_one(run, requests, tmp_path, monkeypatch):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert run("batch", str(requests), "--output", str(whole), *FLAGS)[0] == 0
    for number in (6, 9):
        with monkeypatch.context() as context:
            interrupt_at(context, number)
            assert run("batch", str(requests), "--output", str(out), "--resume", *FLAGS)[0] == 130
        with out.open("a") as stream:
            stream.write('{"id": "r11", "ind')  # a line cut by a power failure
    some = whole_lines(out)
    assert 2 <= len(some) <= 12
    status, _, err = run("batch", str(requests), "--output", str(out), "--resume", *FLAGS)
    assert status == 0 and f"{15 - len(some)} requests, 0 failed" in err and f"; {len(some)} already had results" in err
    assert answers(out) == answers(whole) and len(answers(out)) == 15
    assert out.read_text().startswith("".join(some)), "earlier results are unchanged"


def whole_lines(path) -> list[str]:
    """Return the lines that end in a newline."""
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def open_on_full_disk(path, mode, **options):
    return FullDisk(path, "x") if mode == "xb" else open(path, mode, **options)


def test_full_disk_leaves_whole_lines_and_the_rest_is_served_later(run, requests, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    with monkeypatch.context() as context:
        context.setattr(FullDisk, "ROOM", 900)
        context.setattr(batch_files, "open", open_on_full_disk, raising=False)
        assert run("batch", str(requests), "--output", str(out), *FLAGS)[::2] == (
            1,
            "error: [Errno 28] No space left on device\n",
        )
    before = out.read_text()
    assert 0 < len(before) <= 900 and before.endswith("\n")
    assert run("batch", str(requests), "--output", str(out), "--resume", *FLAGS)[0] == 0
    assert len(answers(out)) == 15 and out.read_text().startswith(before)


def test_nothing_to_do_after_a_complete_run(run, requests, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    assert run("batch", str(requests), "--output", str(out), "--resume")[0] == 0, "the first run may have --resume, too"
    before = out.read_bytes()
    monkeypatch.setattr(LLMEngine, "__init__", lambda *_: pytest.fail("an engine was built"))
    message = f"nothing to do: {out} has the results of all 15 requests\n"
    assert run("batch", str(requests), "--output", str(out), "--resume") == (0, "", message)
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "other", "outputs": []}\n', "line 1: there is no request 'other': the result belongs to another file"),
        ('{"id": "r0"}\nnot JSON\n', "line 2: Expecting value: line 1 column 1"),
        ('{"id": "r0"}\n[]\n', "line 2: the result has no id"),
        ('{"id": "r1", "prompt": "the wood"}\n', "request 'r1' has a different prompt"),
        ('{"index": 0}\n', "line 1: the result has no id"),
        ("\0\0\0\n", "line 1: "),
    ],
)
def test_line_that_is_not_a_result_of_this_file_is_an_error(run, requests, tmp_path, line, message):
    out = tmp_path / "out.jsonl"
    out.write_text(line)
    status, _, err = run("batch", str(requests), "--output", str(out), "--resume")
    assert status == 2 and err.startswith(f"error: {out}") and message in err and err.count("\n") == 1
    assert out.read_text() == line


def test_second_result_of_a_request_is_an_error(run, requests, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text('{"id": "r0"}\n' * 15)
    message = f"error: {out}, line 2: a second result of request 'r0': use --overwrite\n"
    assert run("batch", str(requests), "--output", str(out), "--resume") == (2, "", message)


def test_partial_line_is_removed_once_the_engine_is_built(run, requests, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text('{"id": "r0"}\n{"id": "r1", ')
    assert run("batch", str(requests), "--output", str(out), "--resume", "--block-size", "0")[0] == 2
    assert out.read_text() == '{"id": "r0"}\n{"id": "r1", '


@pytest.mark.parametrize("flags", [[], ["--output", "x", "--overwrite"]], ids=["stdout", "overwrite"])
def test_resume_needs_output_and_excludes_overwrite(run, requests, flags):
    message = "error: --resume needs --output, and excludes --overwrite: it continues a file of results\n"
    assert run("batch", str(requests), "--resume", *flags) == (2, "", message)


@pytest.mark.parametrize("output", ["/dev/null", "."])
def test_only_a_regular_file_can_be_continued(run, requests, output, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    message = f"error: {output} is not a regular file: --resume cannot continue it\n"
    assert run("batch", str(requests), "--resume", "--output", output) == (2, "", message)


def test_failed_requests_are_not_served_again(run, tmp_path):
    requests, out = write(tmp_path / "a.jsonl", {"prompt": ""}, {"prompt": "the", **FOUR}), tmp_path / "out.jsonl"
    assert run("batch", str(requests), "--output", str(out))[0] == 1
    assert run("batch", str(requests), "--output", str(out), "--resume")[0] == 0
    assert len(out.read_text().splitlines()) == 2
