"""nanovllm chat: messages in, answers out as they are generated, and a line about each message without one."""

import codecs
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest

from ... import LLMEngine
from ...cli.chat import Conversation, messages
from ..testing.checkpoints import write_checkpoint
from ..testing.engines import UNMEASURED
from ..testing.processes import start

TEMPLATE = "{% for message in messages %}{{ message.role[0] }}{{ message.content }}. {% endfor %}"
CLOSING = r"\[(\d+) tokens, \d+ tokens/s, (\d+) of (\d+) prompt tokens cached(, [a-z_ ]+)?\]"


@pytest.fixture
def talk(run, monkeypatch, tmp_path):
    """Return a function that sends lines. It returns the exit status, stdout, and the lines of stderr."""
    (tmp_path / "t.jinja").write_text(TEMPLATE)

    def command(*lines: str, flags: tuple[str, ...] = ("--max-tokens", "4", "--temperature", "0", "--ignore-eos")):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status, out, err = run("chat", "--chat-template", str(tmp_path / "t.jinja"), "--block-size", "4", *flags)
        return status, out, err.splitlines()

    return command


def prompts(lines: list[str]) -> list[tuple[int, int]]:
    """Return the prompt tokens of each answer: how many were cached, and how many there are."""
    matches = [re.fullmatch(CLOSING, line) for line in lines]
    return [(int(match[2]), int(match[3])) for match in matches if match]


def test_each_line_is_answered_in_a_growing_conversation(talk):
    status, out, err = talk("the fox", "the wood")
    (_, first), (cached, second) = prompts(err)
    assert status == 0 and len(out.splitlines()) >= 2 and len(err) == 2
    assert second > first + 4 and cached >= first // 4 * 4, "the first turn is in the prefix cache"


def test_only_answers_go_to_standard_output(talk):
    _, once, _ = talk("the fox")
    _, twice, _ = talk("the fox", "/reset", "the fox")
    assert twice == once * 2


def test_undo_removes_a_turn_and_reset_all(talk):
    _, _, err = talk("the fox", "the wood", "/undo", "the wood", "/reset", "the fox", "/undo", "/undo")
    first, second, again, anew = prompts(err)
    assert again[1] == second[1] and anew[1] == first[1] and again[0] > second[0]
    assert err[-1] == "there is no message to undo"


def test_help_lists_commands_and_unknown_ones_are_reported(talk):
    status, out, err = talk("/help", "/hlep", "/exit", "the fox")
    assert (status, out) == (0, "") and err[-1] == "unknown command /hlep: /help lists the commands"
    assert all(any(command in line for line in err) for command in ("/reset", "/undo", "/help", "/exit"))


def test_double_slash_sends_a_slash_and_empty_messages_are_ignored(talk):
    _, _, err = talk("//the", "", "  ")
    assert len(prompts(err)) == 1 and len(err) == 1


def test_system_message_comes_first_and_survives_a_reset(talk):
    flags = ("--max-tokens", "2", "--temperature", "0", "--system", "the wood")
    [(_, without)] = prompts(talk("the", flags=flags[:4])[2])
    [(_, with_it), (_, anew)] = prompts(talk("the", "/reset", "the", flags=flags)[2])
    assert without < with_it == anew


def test_oldest_turns_are_dropped_when_there_is_no_room(talk):
    """The model has 64 positions, and an answer gets at least a quarter of them."""
    _, _, err = talk(*["the little rabbit and the old fox"] * 6)
    dropped = [line for line in err if "dropped" in line]
    assert dropped and dropped[0] == "the oldest turn was dropped: the model has room for 64 tokens"
    assert len(prompts(err)) == 6 and all(count <= 48 for _, count in prompts(err))


def test_message_that_is_too_long_does_not_end_the_conversation(talk):
    status, _, err = talk("the fox", "x" * 100, "the wood")
    assert status == 1 and re.fullmatch(r"not sent: the prompt must have at most 63 tokens, got \d+", err[1])
    assert len(prompts(err)) == 2 and prompts(err)[1][1] > prompts(err)[0][1]


def test_answer_that_outgrows_the_pool_is_an_error(talk):
    flags = ("--kv-cache-tokens", "16", "--ignore-eos", "--temperature", "0")
    status, _, err = talk("the", "/reset", "the", flags=flags)
    assert status == 1 and sum(line.startswith("error: ") for line in err) == 2


def test_answer_that_the_model_ends_is_not_reported_as_cut(talk):
    flags = ("--max-tokens", "9", "--temperature", "0", "--ignore-eos")
    _, out, _ = talk("the fox", flags=flags)
    _, _, (closing,) = talk("the fox", flags=(*flags, "--stop", out[2:4]))
    assert re.fullmatch(CLOSING, closing)[4] is None


def test_error_raised_by_a_template_is_printed(talk, tmp_path):
    (tmp_path / "raises.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    _, out, err = talk("the fox", flags=("--chat-template", str(tmp_path / "raises.jinja")))
    assert (out, err) == ("", ["not sent: roles must alternate"])


def test_model_without_a_template_needs_one(run, checkpoint, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("the fox\n"))
    message = f"{checkpoint} has no chat template: use --chat-template FILE or --chat-template plain"
    assert run("chat") == (2, "", f"error: {message}\n")
    status, out, err = run("chat", "--chat-template", "plain", "--max-tokens", "4", "--ignore-eos")
    assert status == 0 and out and re.fullmatch(CLOSING, err.strip())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--chat-template", "no/such/file"], "chat template no/such/file cannot be read: [Errno 2]"),
        (["--chat-template", "."], "chat template . cannot be read: [Errno 21]"),
        (["--top-p", "2"], "top_p must be above 0 and at most 1, got 2.0"),
        (["--model", "no/such/folder/here"], "the folder "),
    ],
)
def test_invalid_option_is_a_one_line_error(run, monkeypatch, flags, message):
    monkeypatch.setattr("sys.stdin", io.StringIO("the fox\n"))
    status, out, err = run("chat", "--chat-template", "plain", *flags)
    assert (status, out) == (2, "") and err.startswith(f"error: {message}") and err.count("\n") == 1


def test_ctrl_c_stops_an_answer_but_not_the_conversation(talk, monkeypatch):
    step, calls = LLMEngine.step, iter(range(1, 100))

    def interrupted(engine):
        if next(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(LLMEngine, "step", interrupted)
    status, _, err = talk("the fox", "the wood", flags=("--max-tokens", "8", "--temperature", "0", "--ignore-eos"))
    assert status == 0 and len(prompts(err)) == 2
    assert err[0].startswith("[3 tokens, ") and err[0].endswith(", stopped]") and err[1].startswith("[8 tokens")


def test_second_ctrl_c_exits(talk, monkeypatch):
    def interrupted(engine):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the step was run")

    monkeypatch.setattr(LLMEngine, "step", interrupted)
    assert talk("the fox", "the wood") == (130, "", ["interrupted"])


def test_backslash_continues_a_message_on_the_next_line(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a\\\nb\\\n\nc\nd\\"))
    assert list(messages()) == ["a\nb\n", "c", "d"]


def test_invalid_bytes_do_not_stop_other_messages(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\n\xff\nb\n"), encoding="utf-8"))
    status, _, err = run("chat", "--chat-template", "plain", "--max-tokens", "2")
    assert status == 0 and len(prompts(err.splitlines())) == 3


def test_template_with_a_syntax_error_is_refused_at_start(run, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages[0")
    message = "error: line 1 of the chat template: unexpected end of template, expected ','.\n"
    assert run("chat", "--chat-template", str(tmp_path / "t.jinja")) == (2, "", message)


class Letters:
    """A tokenizer with one token per letter."""

    chat_template = TEMPLATE
    special_tokens_map: ClassVar[dict[str, str]] = {}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens, "the template writes BOS"
        return [ord(letter) for letter in text]


def text_of(token_ids: list[int]) -> str:
    return "".join(map(chr, token_ids))


def test_whole_turns_are_dropped_and_never_the_system_message():
    conversation = Conversation(Letters(), None, context_size=40, system="S")
    assert text_of(conversation.ask("one")[0]) == "sS. uone. "
    conversation.answer("1")
    assert text_of(conversation.ask("two")[0]) == "sS. uone. a1. utwo. "
    conversation.answer("2")
    token_ids, num_dropped = conversation.ask("three")
    assert (text_of(token_ids), num_dropped) == ("sS. utwo. a2. uthree. ", 1)
    with pytest.raises(ValueError, match="at most 39 tokens, got 46"):
        conversation.ask("x" * 39)
    assert len(conversation.turns) == 2, "a refused message is not part of the conversation"


# In a terminal


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._fd, inner = pty.openpty()
        package = Path(__file__).resolve().parents[2]
        environment = os.environ | {"PYTHONPATH": str(package.parent), "OMP_NUM_THREADS": "1", "TERM": "xterm"}
        command = [sys.executable, "-m", package.name, "chat", *arguments]
        self.process = subprocess.Popen(
            command, env=environment, start_new_session=True, preexec_fn=lead, stdin=inner, stdout=inner, stderr=inner
        )
        os.close(inner)
        self.shown, self._waited_for = "", 0  # and the length of the part that was waited for
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end in the middle of a character

    def wait_for(self, text: str, press: str = "") -> str:
        """Wait until a text appears after the one that the previous call waited for. Return everything in between.

        Type `press` again after each second without output: readline loses a Ctrl-C that arrives as it starts waiting.
        """
        deadline, start = time.monotonic() + 60, self._waited_for
        while text not in self.shown[start:]:
            assert time.monotonic() < deadline, self.shown
            if select.select([self._fd], [], [], 1)[0]:
                self.shown += self._decoder.decode(os.read(self._fd, 4096))
            else:
                self.type(press)
        self._waited_for = self.shown.index(text, start) + len(text)
        return self.shown[start : self._waited_for]

    def wait_for_characters(self, count: int) -> None:
        """Wait until an answer has begun: for characters after the text that was waited for."""
        while len(self.shown) < self._waited_for + count:
            self.shown += self._decoder.decode(os.read(self._fd, 4096))

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def end(self) -> int:
        status = self.process.wait(timeout=60)
        os.close(self._fd)
        return status


def lead() -> None:
    """Make the process the leader of its terminal, so that it receives Ctrl-C."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def endless(tmp_path):
    """Return options of a chat whose answers take minutes."""
    model = write_checkpoint(tmp_path, max_position_embeddings=10**6)
    lasts = ["--ignore-eos", "--max-tokens", "100000", "--max-model-len", "200000", "--kv-cache-tokens", "300000"]
    return ["--model", str(model), "--chat-template", "plain", *UNMEASURED, *lasts]


@pytest.mark.full
def test_ctrl_c_in_a_terminal_stops_the_answer_and_exits_at_the_prompt(endless):
    terminal = Terminal(*endless)
    terminal.wait_for("> ")
    terminal.type("the fox\n")
    terminal.wait_for("the fox")
    terminal.wait_for_characters(10)
    terminal.type("\x03")
    assert ", stopped]" in terminal.wait_for("> ")
    terminal.type("the wo\\\nod\n")
    assert "… " in terminal.wait_for("… ")
    terminal.wait_for("od")
    terminal.wait_for_characters(10)
    terminal.type("\x03")
    shown = terminal.wait_for("stopped]\x1b[0m")
    assert " prompt tokens cached" in shown and "0 of" not in shown
    terminal.wait_for("> ")
    terminal.type("\x03")
    terminal.wait_for("interrupted", press="\x03")
    assert terminal.end() == 130 and "Traceback" not in terminal.shown


@pytest.mark.full
def test_ctrl_d_in_a_terminal_exits_and_the_up_key_recalls_a_message(checkpoint):
    terminal = Terminal("--model", str(checkpoint), "--chat-template", "plain", *UNMEASURED, "--max-tokens", "4")
    terminal.wait_for("> ")
    terminal.type("the fox\n")
    terminal.wait_for("cached")
    terminal.wait_for("> ")
    terminal.type("\x1b[A")
    terminal.wait_for("the fox")
    terminal.type("\n")
    terminal.wait_for("cached")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.end() == 0 and "Traceback" not in terminal.shown


@pytest.mark.full
def test_second_ctrl_c_exits_in_a_pipe(endless):
    process = start("chat", *endless, stdin=subprocess.PIPE)
    process.stdin.write("the fox\nthe wood\n")
    process.stdin.flush()
    assert process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline().endswith(", stopped]\n")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err and process.returncode in (0, 130)
