"""nanovllm batch: results as requests finish, no work for an invalid file, and nothing lost in an interruption."""

import errno
import io
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from ... import LLM, LLMEngine, SamplingParams
from ...cli import batch_files
from ...cli.batch import serve_all
from ...cli.batch_files import Request, write_line
from ...engine.sequence import Sequence
from ..testing.checkpoints import write_checkpoint
from ..testing.engines import OPTIONS, UNMEASURED
from ..testing.processes import Terminal, press_ctrl_c_again, start

SUMMARY = r"{} requests, {} failed, [\d,]+ tokens, \d+ tokens/s, KV slots: .*\n"
FOUR = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture
def serve(run, tmp_path):
    """Return a function that serves requests with options. It returns the exit status, the results and stderr."""

    def command(requests: list[dict[str, Any]], *flags: str) -> tuple[int, list[dict[str, Any]], str]:
        file = write(tmp_path / "requests.jsonl", *requests)
        status, out, err = run("batch", str(file), *flags)
        return status, parsed(out), err

    return command


def write(file: Path, *requests: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return file


def parsed(text: str) -> list[dict[str, Any]]:
    assert text == "" or text.endswith("\n")
    return [
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON")) for line in text.splitlines()
    ]


# Results


def test_results_match_the_engines(serve, checkpoint):
    requests = [
        {"prompt": "the fox", **FOUR},
        {"prompt": [5, 6, 7], "temperature": 1.0, "seed": 3, "max_tokens": 6, "ignore_eos": True},
        {"prompt": "the wood", "temperature": 0.8, "top_k": 9, "top_p": 0.9, "seed": 4, "n": 2, "max_tokens": 5},
    ]
    params = [SamplingParams(**{key: value for key, value in each.items() if key != "prompt"}) for each in requests]
    expected = LLM(checkpoint, **OPTIONS).generate([each["prompt"] for each in requests], params)
    status, results, err = serve(requests)
    assert status == 0 and re.fullmatch(SUMMARY.format(3, 0), err)
    for output, result in zip(expected, sorted(results, key=lambda result: result["index"]), strict=True):
        assert result["id"] == str(result["index"])
        assert result["prompt"] == requests[result["index"]]["prompt"]
        assert result["num_prompt_tokens"] == len(output.prompt_token_ids)
        for completion, written in zip(output.outputs, result["outputs"], strict=True):
            assert written["cumulative_logprob"] == pytest.approx(completion.cumulative_logprob, abs=1e-4)
            same = ("index", "text", "token_ids", "finish_reason")
            assert [written[name] for name in same] == [getattr(completion, name) for name in same]


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("--ray",), "ray is not installed: pip install '.[ray]'"),
        (("--data-parallel-size", "2"), "--data-parallel-size is 2, but --ray is missing"),
        (("--ray", "--trace", "t.jsonl"), "--trace needs an engine in this process"),
    ],
)
def test_wrong_options_for_ray_are_an_error_in_a_line(serve, monkeypatch, flags, error):
    monkeypatch.setitem(sys.modules, "ray", None)
    status, results, err = serve([{"prompt": "the", **FOUR}], *flags)
    assert (status, results) == (2, []) and error in err and err.count("\n") == 1


def test_fields_without_a_value_are_left_out(serve):
    _, (result,), _ = serve([{"prompt": "the", **FOUR}])
    fields = ["id", "index", "prompt", "outputs", "num_prompt_tokens", "num_cached_tokens", "ttft", "seconds"]
    assert list(result) == fields
    assert list(result["outputs"][0]) == ["index", "text", "token_ids", "cumulative_logprob", "finish_reason"]


def test_times_start_at_the_arrival(serve):
    _, (result,), _ = serve([{"prompt": "the", **FOUR, "max_tokens": 20}])
    assert 0 < result["ttft"] < result["seconds"] < 60


def test_logprobs_are_optional(serve):
    _, (result,), _ = serve([{"prompt": "the fox", **FOUR, "logprobs": 2, "prompt_logprobs": 0}])
    (output,) = result["outputs"]
    assert len(output["logprobs"]) == 4
    for token, place in zip(output["token_ids"], output["logprobs"], strict=True):
        assert [entry["rank"] for entry in place.values()] == [1, 2]
        assert place[str(token)]["rank"] == 1 and place[str(token)]["logprob"] < 0
    first, *others = result["prompt_logprobs"]
    assert first is None and len(others) == result["num_prompt_tokens"] - 1 and all(len(each) == 1 for each in others)


def test_options_are_defaults_of_the_requests(serve):
    flags = ["--max-tokens", "3", "--ignore-eos", "--n", "2", "--logprobs", "0", "--stop-token-ids", "319"]
    _, results, _ = serve([{"prompt": "the"}, {"prompt": "the", "max_tokens": 5, "n": 1}], *flags)
    lengths = {result["id"]: [len(output["token_ids"]) for output in result["outputs"]] for result in results}
    assert lengths == {"0": [3, 3], "1": [5]}
    assert all("logprobs" in output for result in results for output in result["outputs"])


def test_requests_without_a_seed_differ_but_not_between_runs(serve):
    requests = [{"prompt": "the", "max_tokens": 20, "ignore_eos": True}] * 2
    texts = [{result["id"]: result["outputs"][0]["token_ids"] for result in serve(requests)[1]} for _ in range(2)]
    assert texts[0] == texts[1] and texts[0]["0"] != texts[0]["1"]


def test_cached_tokens_are_counted(serve):
    """With one seat, the second request starts when the first one ends. 2 blocks of 4 of its 9 tokens are cached."""
    requests = [{"prompt": [*range(10, 19)], **FOUR}] * 2
    _, results, _ = serve(requests, "--max-num-seqs", "1", "--block-size", "4")
    assert [result["num_cached_tokens"] for result in results] == [0, 8]


def test_result_is_written_when_its_request_finishes(serve):
    lengths = [9, 2, 5]
    _, results, _ = serve([{"prompt": "the", **FOUR, "max_tokens": length} for length in lengths])
    assert [result["index"] for result in results] == [1, 2, 0]


def test_result_is_written_before_the_next_step(checkpoint):
    """A file without a buffer records the engine's steps."""

    class Watched(io.BytesIO):
        def write(self, line):
            written.append(llm.llm_engine.executor.num_steps)
            return super().write(line)

    written = []
    llm = LLM(checkpoint, **OPTIONS)
    requests = [
        Request(str(i), i, "the", SamplingParams(max_tokens=length, ignore_eos=True))
        for i, length in enumerate((9, 2, 5))
    ]
    assert serve_all(llm, requests, Watched(), "m") == 0
    first, *others = written
    assert [steps - first for steps in others] == [3, 7]


def test_requests_may_have_ids(serve):
    _, results, _ = serve([{"id": id, "prompt": "the", **FOUR} for id in ("b", "a", "")])
    assert {(result["id"], result["index"]) for result in results} == {("b", 0), ("a", 1), ("", 2)}


def test_any_prompt_survives(serve):
    prompt = 'é "\u2028\x85\n\t🦊'
    assert [result["prompt"] for result in serve([{"prompt": prompt, **FOUR}])[1]] == [prompt]


def test_numbers_that_json_does_not_have_are_null(serve, monkeypatch):
    """The logits of a model may overflow."""
    append = Sequence.append_token
    monkeypatch.setattr(Sequence, "append_token", lambda seq, token: append(seq, token._replace(logprob=float("-inf"))))
    _, (result,), _ = serve([{"prompt": "the", **FOUR}])
    assert result["outputs"][0]["cumulative_logprob"] is None and len(result["outputs"][0]["token_ids"]) == 4


# Files


def test_requests_from_standard_input(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(json.dumps({"prompt": "the", **FOUR}).encode())))
    status, out, _ = run("batch", "-")
    assert status == 0 and len(parsed(out)) == 1


def test_requests_from_a_pipe(run, monkeypatch):
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        stream.writelines(json.dumps({"prompt": "the", **FOUR, "id": f"r{i}"}) + "\n" for i in range(100))
    with open(reader) as stream:
        monkeypatch.setattr("sys.stdin", stream)
        status, out, _ = run("batch", "-")
    assert status == 0 and {result["id"] for result in parsed(out)} == {f"r{i}" for i in range(100)}


def test_standard_input_may_start_in_the_middle_of_a_file(run, monkeypatch, tmp_path):
    stream = io.BytesIO(b"not a request\n" + json.dumps({"prompt": "the", **FOUR}).encode())
    stream.readline()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(stream))
    status, out, _ = run("batch", "-")
    assert status == 0 and len(parsed(out)) == 1


@pytest.mark.parametrize("now", ['{"prompt": ""}\n', '{"prompt": "the", "id": "x"}\n{"prompt": "the"}\n', '{"prom'])
def test_input_that_changes_during_the_run_ends_it_and_keeps_whole_results(run, monkeypatch, tmp_path, now):
    file = write(tmp_path / "a.jsonl", {"prompt": "the", **FOUR}, {"prompt": "the", **FOUR})

    def build_slowly(**engine):
        file.write_text(now)
        return LLM(**engine)

    monkeypatch.setattr("nanovllm.llm.LLM", build_slowly)
    status, out, err = run("batch", str(file))
    assert status == 1 and f"error: {file} has changed: " in err
    assert len(parsed(out)) <= 1


def test_engine_holds_few_requests_of_a_long_file(run, monkeypatch, tmp_path):
    file, out, held = tmp_path / "a.jsonl", tmp_path / "out.jsonl", []
    step = LLMEngine.step

    def counted(engine):
        held.append(engine.get_num_unfinished_requests())
        return step(engine)

    monkeypatch.setattr(LLMEngine, "step", counted)
    write(file, *[{"prompt": [5, 6], "max_tokens": 1, "temperature": 0}] * 100)
    status, _, err = run("batch", str(file), "--output", str(out), "--max-num-seqs", "8")
    assert status == 0 and re.fullmatch(SUMMARY.format("100", 0), err)
    assert max(held) == 16 and min(held[:-1]) >= 8, "never fewer than the seats"
    assert [result["index"] for result in parsed(out.read_text())] == [*range(100)]


@pytest.mark.nightly
def test_memory_does_not_grow_with_the_file(checkpoint, tmp_path):
    """100,000 requests take less than 30 MiB more than 100: their text alone has 10 MB, their objects 300."""

    def peak(count: int) -> int:
        file, request = tmp_path / "a.jsonl", {"prompt": "the " * 10, "max_tokens": 1, "temperature": 0}
        file.write_text((json.dumps(request) + "\n") * count)
        flags = ["--model", str(checkpoint), *UNMEASURED, "--output", str(tmp_path / "out.jsonl"), "--overwrite"]
        process = start("batch", str(file), *flags, stderr=None)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = status
        assert status == 0 and (tmp_path / "out.jsonl").read_bytes().count(b"\n") == count
        return usage.ru_maxrss // 1024

    small, large = peak(100), peak(100_000)
    assert large < small + 30, f"{small} MiB, {large} MiB"


def test_stats_are_printed_to_standard_error(serve):
    requests = [{"prompt": "the", **FOUR}] * 3
    _, results, err = serve(requests, "--stats", "1e-9")
    *stats, last = err.splitlines()
    assert len(results) == 3 and len(stats) >= 4 and re.fullmatch(SUMMARY.format(3, 0), last + "\n")
    assert all(line.startswith("running ") for line in stats) and "running 3 (" in err
    assert len(serve(requests, "--stats", "1000")[2].splitlines()) == 2, "the first line is printed at once"


def test_byte_order_mark_is_ignored(run, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"requests": [{"prompt": "the", **FOUR}]}), encoding="utf-8-sig")
    assert run("batch", str(tmp_path / "a.json"))[0] == 0


def test_results_go_to_a_file(serve, tmp_path):
    status, results, err = serve([{"prompt": "the", **FOUR}] * 2, "--output", str(tmp_path / "out.jsonl"))
    assert status == 0 and results == [] and re.fullmatch(SUMMARY.format(2, 0), err)
    assert len(parsed((tmp_path / "out.jsonl").read_text())) == 2


def test_existing_results_are_replaced_with_overwrite_only(serve, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("of yesterday\n")
    status, _, err = serve([{"prompt": "the", **FOUR}], "--output", str(out))
    assert (status, err) == (2, f"error: {out} exists: use --resume to continue it, or --overwrite to replace it\n")
    assert out.read_text() == "of yesterday\n"
    assert serve([{"prompt": "the", **FOUR}], "--output", str(out), "--overwrite")[0] == 0
    assert len(parsed(out.read_text())) == 1


def test_file_of_requests_is_never_replaced(run, tmp_path):
    file = write(tmp_path / "a.jsonl", {"prompt": "the", **FOUR})
    (tmp_path / "b.jsonl").symlink_to(file)
    before = file.read_text()
    for name in ("a.jsonl", "b.jsonl"):
        status, _, err = run("batch", str(file), "--output", str(tmp_path / name), "--overwrite")
        assert (status, err) == (
            2,
            f"error: {tmp_path / name} is the file of requests: write the results to a different file\n",
        )
    assert file.read_text() == before


def test_failed_start_keeps_old_results(serve, tmp_path):
    out = tmp_path / "out.jsonl"
    bad = ["--output", str(out), "--overwrite", "--block-size", "0"]
    assert serve([{"prompt": "the"}], *bad)[0] == 2 and not out.exists()
    out.write_text("of yesterday\n")
    assert serve([{"prompt": "the"}], *bad)[0] == 2 and out.read_text() == "of yesterday\n"


def test_output_that_appears_during_the_run_is_not_replaced(serve, monkeypatch, tmp_path):
    out = tmp_path / "out.jsonl"

    def build_slowly(**engine):
        out.write_text("of another run\n")
        return LLM(**engine)

    monkeypatch.setattr("nanovllm.llm.LLM", build_slowly)
    assert serve([{"prompt": "the"}], "--output", str(out))[::2] == (2, f"error: [Errno 17] File exists: '{out}'\n")
    assert out.read_text() == "of another run\n"


# Errors before anything is computed


@pytest.fixture
def no_engine(monkeypatch):
    """Fail if the test builds an engine."""
    monkeypatch.setattr("nanovllm.llm.LLM", lambda **engine: pytest.fail("an engine was built"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            b'{"prompt": "a"}\n{"prompt": "b", "top_p": 1.5}',
            "request 1 (line 2): top_p must be above 0 and at most 1, got 1.5",
        ),
        (b'{"prompt": "a", "max_token": 5}', "request 0 (line 1): "),
        (b'{"prompt": "a", "n": 1000000000000}', "n must be"),
        (b"", " has no requests"),
        (b"\xff\xfe", "line 1"),
        (b'{"prompt": "a"}\n' + b" " * 2**20 + b"\xc3(", "line 2: 'utf-8' codec can't decode byte 0xc3"),
        (b'{"prompt": "\xc3', "line 1: 'utf-8' codec can't decode byte 0xc3"),
        (b"[" * 100_000, "line 1: maximum recursion depth exceeded"),
        (b'{"requests": ' + b"[" * 100_000, "line 1: maximum recursion depth exceeded"),
        (b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}", "Exceeds the limit"),
    ],
    ids=[
        "value",
        "field",
        "samples",
        "empty",
        "bytes",
        "bytes later",
        "half a character",
        "deep",
        "deep document",
        "long number",
    ],
)
def test_invalid_file_is_a_one_line_error_that_names_it(run, no_engine, tmp_path, text, message):
    file, out = tmp_path / "a.jsonl", tmp_path / "out.jsonl"
    file.write_bytes(text)
    status, printed, err = run("batch", str(file), "--output", str(out))
    assert (status, printed) == (2, "") and not out.exists()
    assert err.startswith(f"error: {file}") and message in err and err.count("\n") == 1


@pytest.mark.parametrize("file", ["/dev/zero", "-"])
def test_endless_file_is_a_one_line_error(run, no_engine, monkeypatch, file):
    monkeypatch.setattr(batch_files, "MAX_LINE_BYTES", 1000)
    with open("/dev/zero") as zeros:
        monkeypatch.setattr("sys.stdin", zeros)
        name = "standard input" if file == "-" else file
        message = f"error: {name}: a line must have at most 1,000 bytes\n"
        assert run("batch", file) == (2, "", message)


def test_lines_have_a_limit(run, no_engine, monkeypatch, tmp_path):
    monkeypatch.setattr(batch_files, "MAX_LINE_BYTES", 16)
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "ab"}\n')
    assert run("batch", str(file)) == (2, "", f"error: {file}: a line must have at most 16 bytes\n")
    file.write_text('{"prompt": [-1]}')

    assert "at most 16 bytes" not in run("batch", str(file), "--top-p", "2")[2]


def test_unreadable_file_is_named(run, no_engine, tmp_path):
    for path, message in (
        (tmp_path / "a", "[Errno 2] No such file or directory"),
        (tmp_path, "[Errno 21] Is a directory"),
    ):
        assert run("batch", str(path)) == (2, "", f"error: {message}: '{path}'\n")


@pytest.mark.parametrize(
    ("output", "message"),
    [("no/such/out.jsonl", "the folder {}/no/such for out.jsonl does not exist"), (".", "{} exists")],
)
def test_results_that_cannot_be_kept_are_not_computed(serve, no_engine, tmp_path, output, message):
    status, _, err = serve([{"prompt": "the"}], "--output", str(tmp_path / output))
    assert status == 2 and message.format(tmp_path) in err and err.count("\n") == 1


def test_folder_cannot_be_replaced(serve, tmp_path):
    status, _, err = serve([{"prompt": "the"}], "--output", str(tmp_path), "--overwrite")
    assert (status, err) == (2, f"error: [Errno 21] Is a directory: '{tmp_path}'\n")


def test_invalid_option_is_an_error_even_if_no_request_uses_it(serve, no_engine):
    assert serve([{"prompt": "the", "top_p": 0.5}], "--top-p", "2")[2] == (
        "error: top_p must be above 0 and at most 1, got 2.0\n"
    )


# Requests that cannot be served


def test_request_that_cannot_be_served_does_not_stop_the_others(serve):
    requests = [
        {"prompt": "a" * 100},
        {"prompt": "the", **FOUR},
        {"prompt": ""},
        {"prompt": [9999]},
        {"prompt": [5], **FOUR},
        {"prompt": "fo\ud800x"},
    ]
    status, results, err = serve(requests)
    assert status == 1 and re.fullmatch(SUMMARY.format(6, 4), err)
    errors = {result["index"]: result["error"] for result in results if "error" in result}
    expected = {0: ("101", "64"), 2: ("empty",), 3: ("9999", "319"), 5: (r"'\ud800'",)}
    assert errors.keys() == expected.keys()
    assert all(part in errors[index] for index, parts in expected.items() for part in parts)
    assert all(result["outputs"][0]["finish_reason"] == "error" for result in results if "error" in result)


def test_request_that_outgrows_the_pool_keeps_its_tokens(serve):
    """A pool of 16 slots holds 2 tokens of the prompt and 14 others; the last token needs no slot."""
    flags = ["--kv-cache-tokens", "16", "--block-size", "4"]
    status, (result,), _ = serve([{"prompt": "the", "max_tokens": 40, "ignore_eos": True}], *flags)
    assert status == 1 and result["error"] and len(result["outputs"][0]["token_ids"]) == 15


# Progress


def test_terminal_shows_a_progress_bar(serve, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    status, results, _ = serve([{"prompt": "the", **FOUR}] * 3)
    assert status == 0 and len(results) == 3
    assert "0/3" in terminal.getvalue() and "3/3" in terminal.getvalue() and "tokens/s" in terminal.getvalue()


# Interruptions


def test_ctrl_c_reports_the_finished_requests(serve, monkeypatch, tmp_path):
    """The current step runs to its end, and with it the first and the last request."""
    step, calls = LLMEngine.step, iter(range(1, 100))

    def interrupted(engine):
        if next(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(LLMEngine, "step", interrupted)
    requests = [{"prompt": "the", **FOUR, "max_tokens": length} for length in (4, 30, 4)]
    status, _, err = serve(requests, "--output", str(tmp_path / "out.jsonl"))
    assert (status, err) == (130, "interrupted: 2 of 3 requests have results\n")
    assert [result["index"] for result in parsed((tmp_path / "out.jsonl").read_text())] == [0, 2]


def test_second_ctrl_c_exits_at_once(serve, monkeypatch, tmp_path):
    def interrupted(engine):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the step was run")

    monkeypatch.setattr(LLMEngine, "step", interrupted)
    assert serve([{"prompt": "the", **FOUR}])[:2] == (130, [])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("where", [["--output", "/dev/full", "--overwrite"], []], ids=["file", "stdout"])
def test_full_disk_is_a_one_line_error(serve, monkeypatch, where):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert serve([{"prompt": "the", **FOUR}], *where) == (1, [], "error: [Errno 28] No space left on device\n")


class FullDisk(io.FileIO):
    """A file on a disk with room for ROOM bytes."""

    ROOM = 100

    def write(self, data) -> int:
        room = self.ROOM - self.tell()
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data[:room])


def test_full_disk_never_leaves_a_partial_line(tmp_path):
    lines = ["a" * 49 + "\n", "b" * 40 + "\n", "c" * 49 + "\n"]
    with FullDisk(tmp_path / "out.jsonl", "x") as stream:
        for line in lines[:2]:
            write_line(stream, line)
        with pytest.raises(OSError, match="No space left"):
            write_line(stream, lines[2])
    assert (tmp_path / "out.jsonl").read_text() == lines[0] + lines[1]


def test_full_disk_keeps_earlier_lines(tmp_path):
    """A file opened to append, as by a shell's >>, reports position 0 at first."""
    (tmp_path / "out.jsonl").write_text("of yesterday\n" + "." * 80 + "\n")
    with FullDisk(tmp_path / "out.jsonl", "a") as stream, pytest.raises(OSError):
        write_line(stream, "a" * 49 + "\n")
    assert (tmp_path / "out.jsonl").read_text() == "of yesterday\n" + "." * 80 + "\n"


@pytest.mark.full
def test_closed_standard_error_costs_no_results(checkpoint, tmp_path):
    file = write(tmp_path / "a.jsonl", {"prompt": "the", **FOUR})
    process = start("batch", str(file), "--model", str(checkpoint), *UNMEASURED, closed="stderr")
    assert len(parsed(process.communicate(timeout=60)[0])) == 1 and process.returncode == 0


@pytest.fixture
def two_short_requests_and_a_long_one(tmp_path):
    """Return a batch with two immediate results, and a third one after minutes."""
    model = write_checkpoint(tmp_path, max_position_embeddings=10**6)
    lengths = (3, 100_000, 4)
    file = write(tmp_path / "a.jsonl", *[{"prompt": "the", **FOUR, "max_tokens": length} for length in lengths])
    flags = ["--max-num-seqs", "3", "--kv-cache-tokens", "200000", *UNMEASURED]
    return ["batch", str(file), "--model", str(model), *flags]


@pytest.mark.full
def test_process_that_is_interrupted_twice_has_written_finished_requests_and_one_line(
    two_short_requests_and_a_long_one, tmp_path
):
    process = start(*two_short_requests_and_a_long_one, path=press_ctrl_c_again(tmp_path))
    lines = [process.stdout.readline() for _ in range(2)]
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130 and rest == ""
    assert err == "interrupted: 2 of 3 requests have results\n"
    assert [json.loads(line)["index"] for line in lines] == [0, 2]


def test_closed_pipe_ends_the_command_silently(serve, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert serve([{"prompt": "the", **FOUR}]) == (141, [], "")


@pytest.mark.full
def test_pipe_closed_in_the_middle_ends_the_command_without_a_traceback(tmp_path, checkpoint):
    file = write(tmp_path / "a.jsonl", *[{"prompt": "the", **FOUR}] * 2000)
    flags = ["--model", str(checkpoint), *UNMEASURED, "--n", "4"]
    process = start("batch", str(file), *flags)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 141 and process.stderr.read() == ""
    process.stderr.close()
