"""The server's processes: signals, kills and bad options. No process is left behind."""

import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from ..testing.processes import REPOSITORY, is_alive, until
from ..testing.served import serving, stream

LONG = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True}
LONGER = LONG | {"n": 8}


def running(served) -> None:
    """Wait until the engine runs a request and has sent a first token: until another one is served beside it."""
    until(lambda: re.search(r"num_requests_running\S* [1-9]", httpx.get(served.url + "/metrics").text) is not None)
    assert served.completion(max_tokens=1)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_signal_lets_a_stream_finish_and_exits_with_0(number):
    with serving("--shutdown-timeout", "600") as served, ThreadPoolExecutor() as threads:
        engine = served.engine_process()
        result = threads.submit(stream, served, "/v1/completions", **LONG)
        running(served)
        assert served.stop(number) == 0
        *_, last, done = result.result()
        assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
        assert not is_alive(engine)


@pytest.mark.full
def test_stream_ends_with_an_error_after_the_shutdown_timeout():
    with serving("--shutdown-timeout", "0") as served, ThreadPoolExecutor() as threads:
        result = threads.submit(stream, served, "/v1/completions", **LONGER)
        running(served)
        assert served.stop() == 0
        assert "shutting down" in result.result()[-1]["error"]["message"]


@pytest.mark.full
def test_killed_engine_fails_the_health_check_and_ends_the_front():
    with serving() as served, ThreadPoolExecutor() as threads:
        result = threads.submit(stream, served, "/v1/completions", **LONGER)
        running(served)
        os.kill(served.engine_process(), signal.SIGKILL)
        until(lambda: httpx.get(served.url + "/health").status_code == 503)
        assert result.result()[-1]["error"]["message"] == "The engine has ended."
        assert served.process.wait(60) == 1
        assert "error: the engine has ended: its process was ended by signal 9" in served.process.stderr.read()


@pytest.mark.full
@pytest.mark.parametrize(
    "end",
    [
        "kill a rank",
        pytest.param("kill the engine", marks=pytest.mark.nightly),
        pytest.param("stop the server", marks=pytest.mark.nightly),
    ],
)
def test_server_with_two_ranks_answers_like_one_and_leaves_nothing(end):
    with serving() as one:
        expected = one.completion(max_tokens=24)["choices"]
    with serving("--tensor-parallel-size", "2", "--shutdown-timeout", "600") as served, ThreadPoolExecutor() as threads:
        engine = served.engine_process()
        [rank] = children(engine, "distributed.followers")
        body = LONG | {"max_tokens": 100} if end == "stop the server" else LONGER
        assert served.completion(max_tokens=24)["choices"] == expected
        result = threads.submit(stream, served, "/v1/completions", **body)
        running(served)
        if end == "stop the server":
            assert served.stop() == 0 and result.result()[-1] == "[DONE]"
        else:
            os.kill(rank if end == "kill a rank" else engine, signal.SIGKILL)
            until(lambda: not is_alive(engine))
            assert "error" in result.result()[-1] and served.process.wait(60) == 1
            assert "error: the engine has ended: " in served.process.stderr.read()
        until(lambda: not is_alive(rank))


@pytest.mark.full
def test_killed_front_leaves_no_engine():
    with serving() as served, ThreadPoolExecutor() as threads:
        engine = served.engine_process()
        result = threads.submit(stream, served, "/v1/completions", **LONGER)
        running(served)
        served.process.kill()
        until(lambda: not is_alive(engine))
        with pytest.raises(httpx.HTTPError):
            result.result()


@pytest.mark.full
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGKILL]
)
def test_server_that_is_still_loading_ends_at_once(number):
    process = start()
    until(lambda: children(process.pid, "spawn_main") != [])
    engines = children(process.pid, "spawn_main")
    process.send_signal(number)
    assert process.wait(60) == {signal.SIGTERM: 0, signal.SIGINT: 130, signal.SIGKILL: -9}[number]
    until(lambda: not any(map(is_alive, engines)))
    process.communicate()


@pytest.mark.full
@pytest.mark.parametrize("when", ["it loads", "it serves"])
def test_ctrl_c_in_a_terminal_reaches_both_processes_and_is_one_line(when):
    """A terminal sends it to the engine's process too."""
    process = start(start_new_session=True)
    until(lambda: children(process.pid, "spawn_main") != [])
    while when == "it serves" and not process.stderr.readline().startswith("serving "):
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err and err.count("interrupted") == (process.returncode == 130)


def start(*flags: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "nanovllm", "serve", "--port", "0", *flags]
    return subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, **options)


def children(parent: int, word: str) -> list[int]:
    """Return the child processes with this word in their commands."""
    found = subprocess.run(["pgrep", "-P", str(parent), "-f", word], capture_output=True, text=True)
    return [int(each) for each in found.stdout.split()]


def test_taken_port_is_a_one_line_error_before_the_model_is_read(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = f"error: cannot listen at 127.0.0.1, port {port}: Address already in use\n"
        assert run("serve", "--port", port) == (2, "", message)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--port", "70000"), "port must be from 0 to 65535, got 70000"),
        (("--host", "no such host", "--port", "0"), "cannot listen at no such host, port 0: "),
        (("--host", "..", "--port", "0"), "cannot listen at .., port 0: "),
        (
            ("--chat-template", "/nothing"),
            "chat template /nothing cannot be read: [Errno 2] No such file or directory: '/nothing'",
        ),
        (("--block-size", "0"), "block_size must be "),
        (("--shutdown-timeout", "nan"), "shutdown_timeout must be a finite number, got nan"),
    ],
    ids=str,
)
def test_bad_option_is_a_one_line_error(run, flags, message):
    status, out, err = run("serve", *flags)
    assert (status, out) == (2, "") and err.startswith(f"error: {message}") and err.count("\n") == 1
