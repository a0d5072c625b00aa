"""Standard input and output: closed, endless, or not in UTF-8."""

import codecs
import io
import sys
from typing import IO, TextIO

MAX_FILE_BYTES = 1 << 30
MAX_PROMPT_CHARACTERS = 1 << 24
PIECE = 1 << 20


def show_what_can_be_shown() -> None:
    """What a terminal has no sign for is shown as a question mark, as by the stages."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


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


def read_prompt() -> str:
    """A prompt from standard input, without the newlines at its end."""
    text = standard_input().read(MAX_PROMPT_CHARACTERS + 1)
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise ValueError(f"standard input has more than {MAX_PROMPT_CHARACTERS:,} characters: that is no prompt")
    return text.rstrip("\n")


def read_file(file: str) -> str:
    """All of a file; - is standard input. OSError if it cannot be read.

    Raises ValueError as soon as it can be no text, or is too long: /dev/zero never ends.
    """
    if file == "-":
        return read_text(standard_input().buffer)
    with open(file, "rb") as stream:
        return read_text(stream)


def read_text(stream: IO[bytes]) -> str:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    pieces: list[str] = []
    size = 0
    while piece := stream.read(PIECE):
        try:
            pieces.append(decoder.decode(piece))
        except UnicodeDecodeError as error:
            place = size + len(piece) - len(error.object) + error.start  # the decoder may have kept some bytes
            raise ValueError(f"no UTF-8 text: byte {error.object[error.start]:#04x} in place {place}") from None
        if "\0" in pieces[-1]:
            raise ValueError(f"no text: a zero byte among bytes {size:,} to {size + len(piece):,}")
        size += len(piece)
        if size > MAX_FILE_BYTES:
            raise ValueError(f"more than {MAX_FILE_BYTES:,} bytes")
    try:
        return "".join([*pieces, decoder.decode(b"", final=True)])
    except UnicodeDecodeError:
        raise ValueError("no UTF-8 text: it ends in the middle of a character") from None
