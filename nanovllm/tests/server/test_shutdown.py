"""The server as processes: signals, sudden ends, mistakes on its command line. No process is left behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from .served import ROOT, is_alive, serving, stream, until

LONG = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True}


def running(served) -> None:
    """Wait until the engine has begun a request: the next one is answered beside it."""
    time.sleep(0.2)
    assert served.completion(max_tokens=1)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_lets_a_stream_end_and_the_status_is_0(number):
    with serving() as served, ThreadPoolExecutor() as threads:
        engine = served.engine_process()
        answer = threads.submit(stream, served, "/v1/completions", **LONG)
        running(served)
        assert served.stop(number) == 0
        *_, last, done = answer.result()
        assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
        assert not is_alive(engine)


@pytest.mark.full
def test_after_the_time_out_a_stream_is_cut_and_says_so():
    with serving("--shutdown-timeout", "0") as served, ThreadPoolExecutor() as threads:
        answer = threads.submit(stream, served, "/v1/completions", **LONG, n=8)
        running(served)
        start = time.monotonic()
        assert served.stop() == 0 and time.monotonic() - start < 5
        assert "shutting down" in answer.result()[-1]["error"]["message"]


@pytest.mark.full
def test_a_killed_engine_turns_health_red_and_ends_the_front():
    with serving() as served, ThreadPoolExecutor() as threads:
        answer = threads.submit(stream, served, "/v1/completions", **LONG)
        running(served)
        os.kill(served.engine_process(), signal.SIGKILL)
        until(lambda: httpx.get(served.url + "/health").status_code == 503, 1)
        assert answer.result()[-1]["error"]["message"] == "the engine has ended"
        assert served.process.wait(10) == 1
        assert "error: the engine has ended: its process was ended by signal 9" in served.process.stderr.read()


@pytest.mark.full
def test_a_killed_front_leaves_no_orphan():
    with serving() as served, ThreadPoolExecutor() as threads:
        engine = served.engine_process()
        answer = threads.submit(stream, served, "/v1/completions", **LONG)
        running(served)
        served.process.kill()
        until(lambda: not is_alive(engine), 2)
        with pytest.raises(httpx.HTTPError):
            answer.result()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_server_that_is_still_loading_ends_at_once(number):
    process = start()
    until(lambda: engines_of(process) != [])
    engines = engines_of(process)
    process.send_signal(number)
    assert process.wait(5) == {signal.SIGTERM: 0, signal.SIGINT: 130, signal.SIGKILL: -9}[number]
    until(lambda: not any(map(is_alive, engines)), 5)
    process.communicate()


def start(*flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "nanovllm", "serve", "--port", "0", *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )


def engines_of(process: subprocess.Popen[str]) -> list[int]:
    asked = ["pgrep", "-P", str(process.pid), "-f", "spawn_main"]
    return [int(each) for each in subprocess.run(asked, capture_output=True, text=True).stdout.split()]


def test_a_port_that_is_taken_is_told_in_one_line_before_a_model_is_read(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        says = f"error: cannot listen at 127.0.0.1, port {port}: Address already in use\n"
        assert run("serve", "--port", port) == (2, "", says)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--port", "70000"), "port must be from 0 to 65535, got 70000"),
        (("--host", "no such host", "--port", "0"), "cannot listen at no such host, port 0: "),
        (
            ("--chat-template", "/nothing"),
            "chat template /nothing cannot be read: [Errno 2] No such file or directory: '/nothing'",
        ),
        (("--block-size", "0"), "block_size must be "),
        (("--shutdown-timeout", "nan"), "shutdown_timeout must be a finite number, at least 0, got nan"),
    ],
    ids=str,
)
def test_a_mistake_on_the_command_line_is_told_in_one_line(run, flags, says):
    status, out, err = run("serve", *flags)
    assert (status, out) == (2, "") and err.startswith(f"error: {says}") and err.count("\n") == 1
