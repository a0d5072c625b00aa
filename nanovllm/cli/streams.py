"""Standard input and output: closed, endless, or not in UTF-8."""

import io
import os
import sys
from contextlib import nullcontext
from typing import IO, TextIO

MAX_PROMPT_CHARACTERS = 1 << 24


def keep_descriptors() -> None:
    """Give each standard stream that is closed a descriptor: or a file that is opened later takes its place."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it takes the lowest number that is free: this one
    if sys.stderr is None:  # print(file=None) writes to standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def show_what_can_be_shown() -> None:
    """What a terminal has no sign for is shown as a question mark, as by the stages."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def dim(text: str) -> str:
    """For standard error: beside what matters, where the terminal can show it so."""
    plain = not sys.stderr.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[2m{text}\x1b[0m"


def standard_input() -> TextIO:
    if sys.stdin is None:
        raise ValueError("standard input is closed")
    return sys.stdin


def standard_output() -> TextIO:
    if sys.stdout is None:
        raise ValueError("standard output is closed: the results would be lost")
    return sys.stdout


def unbuffered(stream: TextIO) -> IO[bytes]:
    """What is written to it is there at once."""
    stream.flush()
    return getattr(stream.buffer, "raw", stream.buffer)


def read_prompt(file: str) -> str:
    """The text of a file, without the newlines at its end; - is standard input.

    Raises ValueError if it is no text, or too long for one: /dev/zero never ends. OSError if it cannot be read.
    """
    with nullcontext(standard_input()) if file == "-" else open(file, encoding="utf-8") as stream:
        name = "standard input" if file == "-" else file
        try:
            text = stream.read(MAX_PROMPT_CHARACTERS + 1)
        except UnicodeDecodeError as error:
            raise ValueError(f"{name}: no {error.encoding} text: byte {error.object[error.start]:#04x}") from None
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise ValueError(f"{name} has more than {MAX_PROMPT_CHARACTERS:,} characters: that is no prompt")
    return text.rstrip("\n")
