"""What a terminal may do to the command: closed ends, a full disk, another encoding. Each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ...engine import console

PACKAGE = console.__package__


def start(*argv: str, command: str = "", **options) -> subprocess.CompletedProcess:
    """The command in a process of its own; `command` is a line for a shell, in which "$@" is the command."""
    line = ["sh", "-c", command or '"$@"', "sh", sys.executable, "-m", PACKAGE, *argv]
    folder = Path(__file__).parents[1 + PACKAGE.count(".") + 1]  # the one that holds the package
    env = os.environ | {"OMP_NUM_THREADS": "1"} | options
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, timeout=120)


@pytest.fixture
def story(checkpoint) -> list[str]:
    return ["--model", str(checkpoint), "--max-tokens", "6", "--temperature", "0", "the fox"]


@pytest.mark.parametrize("shell", ['"$@" >&-', '"$@" <&-', '"$@" 2>&-', '"$@" | head -c 1', '"$@" --help | head -c 1'])
def test_a_closed_end_gives_no_traceback(story, shell):
    ended = start(*story, command=shell)
    assert ended.returncode == 0 and ended.stderr == b""  # of a pipe, head's


def test_a_full_disk_is_one_line(story):
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    ended = start(*story, command='"$@" > /dev/full')
    assert ended.returncode == 1 and ended.stderr == b"error: [Errno 28] No space left on device\n"


def test_a_terminal_that_is_not_utf8_shows_a_question_mark(story):
    ended = start(*story[:-1], "the \u00fcber fox", PYTHONIOENCODING="ascii")
    assert ended.returncode == 0 and ended.stderr == b"" and ended.stdout.startswith(b"the ?ber fox")


def test_a_prompt_that_is_not_utf8_is_one_line(story):
    ended = start(*story[:-1], os.fsdecode(b"the f\xfcx"))
    assert ended.returncode == 1 and ended.stderr == b"error: the prompt is no UTF-8 text: '\\udcfc' in place 5\n"


def test_a_command_s_own_exit_and_its_faults_are_left_alone():
    with pytest.raises(SystemExit):
        console.run_command(lambda: sys.exit(2))
    with pytest.raises(ZeroDivisionError):
        console.run_command(lambda: 1 // 0)
