"""The commands as processes: they end with one line, whatever happens to their streams and whenever Ctrl-C comes."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from ..options.config import EngineConfig
from ..requests.sampling_params import SamplingParams
from .testing.engines import UNMEASURED
from .testing.processes import REPOSITORY, processor_seconds, start

SMALL = ("--input-len", "4", "--output-len", "3", "--rounds", "1")
NAMES = ["generate", "batch", "chat", "bench", "stages", "help"]


@pytest.fixture
def command(checkpoint, tmp_path):
    """Return arguments of each command for a short run."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "the", "max_tokens": 2}) + "\n")
    model = ["--model", str(checkpoint), *UNMEASURED]
    return {
        "generate": ["generate", "-", *model, "--max-tokens", "3"],
        "batch": ["batch", str(tmp_path / "a.jsonl"), *model],
        "chat": ["chat", *model, "--chat-template", "plain", "--max-tokens", "3"],
        "bench": ["bench", "latency", *model, *SMALL],
        "stages": ["stages"],
        "help": ["--help"],
    }


def finish(process: subprocess.Popen[str], text: str = "the fox\n") -> tuple[int, str, str]:
    """Return the exit status, and the contents of the streams that are pipes."""
    out, err = process.communicate(text if process.stdin else None, timeout=60)
    return process.returncode, out or "", err or ""


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
class TestStreams:
    def test_full_disk_is_one_clear_error(self, command, name):
        with open("/dev/full", "w") as full:
            ended = finish(start(*command[name], stdin=subprocess.PIPE, stdout=full))
        assert ended == (1, "", "error: [Errno 28] No space left on device\n")

    def test_messages_that_cannot_be_written_are_ignored(self, command, name):
        with open("/dev/full", "w") as full:
            status, out, _ = finish(start(*command[name], stdin=subprocess.PIPE, stderr=full))
        assert status == 0 and out

    def test_output_is_complete_without_standard_error(self, command, name):
        status, out, _ = finish(start(*command[name], stdin=subprocess.PIPE, closed="stderr"))
        assert status == 0 and out and "error" not in out

    def test_closed_streams_do_not_matter(self, command, name):
        assert finish(start(*command[name], stdin=subprocess.PIPE, closed="stdout"))[0] == 0
        _, _, err = finish(start(*command[name], closed="stdin"))
        assert "Traceback" not in err

    def test_closed_pipe_ends_a_command_silently(self, command, name):
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "w") as closed_reader:
            status, _, err = finish(start(*command[name], stdin=subprocess.PIPE, stdout=closed_reader))
        assert status == 141 and "Traceback" not in err and "Errno" not in err

    @pytest.mark.parametrize("encoding", ["ascii", "C"])
    def test_terminals_of_any_encoding_and_width_work(self, command, name, encoding):
        env = {"LC_ALL": "C", "LANG": "C", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "11", "PYTHONUTF8": "0"}
        if encoding != "C":
            env["PYTHONIOENCODING"] = f"{encoding}:strict"
        ended = finish(start(*command[name], stdin=subprocess.PIPE, env=env, errors="replace"))
        assert ended[0] == 0 and "Traceback" not in ended[2]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["generate", "batch", "chat", "bench"])
def test_ctrl_c_at_any_moment_ends_in_one_line_and_leaves_whole_results(command, checkpoint, tmp_path, name):
    """Python itself takes the first hundredths of a second, and until our handler is imported the process just ends."""
    requests, out = tmp_path / "many.jsonl", tmp_path / "out.jsonl"
    requests.write_text((json.dumps({"prompt": "the", "max_tokens": 4}) + "\n") * 3000)
    lasting = {
        "generate": [*command["generate"], "--ignore-eos", "--max-tokens", "60"],
        "batch": ["batch", str(requests), *command["batch"][2:], "--output", str(out), "--overwrite"],
        "chat": command["chat"],
        "bench": [*command["bench"], "--rounds", "10000"],
    }[name]

    def wait(seconds: float) -> None:
        """Wait until the process has used that processor time, since others may slow it down, or for four seconds."""
        stat, end = Path(f"/proc/{process.pid}/stat"), time.monotonic() + 4
        while time.monotonic() < end:
            user, system = stat.read_text().rpartition(")")[2].split()[11:13]
            if (int(user) + int(system)) / os.sysconf("SC_CLK_TCK") >= seconds:
                return
            time.sleep(0.01)

    for moment in range(12):
        process = start(*lasting, stdin=subprocess.PIPE)
        process.stdin.write("the fox\n")
        process.stdin.flush()
        wait(0.12 + moment * 0.23)
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)  # a chat continues after the first one
        status, _, err = finish(process, "")
        message = [line for line in err.splitlines() if "interrupted" in line]
        assert "Traceback" not in err and (status, len(message)) in ((130, 1), (0, 0), (-2, 0)), (moment, status, err)
        if out.exists():
            assert all(json.loads(line) for line in out.read_text().splitlines())
            assert out.read_text()[-1:] in ("", "\n")


@pytest.mark.nightly
def test_first_token_of_a_cold_start_comes_soon_after_the_import_of_torch():
    """Compare processor time on the shipped checkpoint, the best of 3 in turns: other programs may be running."""
    model = REPOSITORY / "models" / "storyteller"
    if not model.is_dir():
        pytest.skip("the shipped checkpoint is not in a package that is installed")
    command = [sys.executable, "-m", "nanovllm", "generate", "Once", "--max-tokens", "1", "--model", str(model)]
    subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True)  # compiles kernels
    torch, first = processor_seconds([sys.executable, "-c", "import torch"], command, rounds=3)
    assert first < 2 * torch + 1, (first, torch)


# Extreme numbers, in this process

OPTIONS = [field for field in [*fields(EngineConfig), *fields(SamplingParams)] if "help" in field.metadata]
NUMBERS = [field.name for field in OPTIONS if {int, float} & {field.type, *get_args(field.type)}]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("number", ["9" * 23, "-1", "nan"])
def test_extreme_number_is_one_clear_error(run, name, number):
    """Some may be arbitrarily large: they are limits that are never reached."""
    status, out, err = run("generate", "the", "--max-tokens", "2", "--" + name.replace("_", "-"), number)
    assert status in (0, 2) and "Traceback" not in err
    if status:
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser may read every file")
def test_unreadable_file_is_one_clear_error(run, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("{}")
    file.chmod(0)
    for arguments in (["batch", str(file)], ["generate", "--file", str(file)], ["chat", "--chat-template", str(file)]):
        status, out, err = run(*arguments)
        assert (status, out) == (2, "") and err == f"error: [Errno 13] Permission denied: '{file}'\n"
