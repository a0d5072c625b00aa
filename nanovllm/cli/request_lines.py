"""What a file of requests holds, a value at a time: JSON lines, or one document {"requests": [...]}."""

import json
from collections.abc import Iterator
from typing import IO, Any, Protocol

from ..server.openai.json_values import shortened

MAX_BYTES = 1 << 30  # of a line, and of a document
PIECE = 1 << 20

Place = str  # where a value stands, for an error: " (line 3)"; empty in a document


class Source(Protocol):
    def readline(self, size: int) -> bytes: ...


class Spool:
    """Reads what can be read only once, a pipe say, and writes it to a copy."""

    def __init__(self, source: IO[bytes], copy: IO[bytes]) -> None:
        self._source, self._copy = source, copy

    def readline(self, size: int) -> bytes:
        line = self._source.readline(size)
        self._copy.write(line)
        return line


def values(source: Source) -> Iterator[tuple[Place, Any]]:
    """Each value that should be a request. Raises ValueError for what is no JSON, or no text.

    If the first line is JSON by itself, all lines are: then one line is in memory at a time. A document is read whole.
    """
    lines = numbered_lines(source)
    number, first = next(filter(is_filled, lines), (0, ""))
    if not first:
        return
    try:
        value = parse(first, number)
    except ValueError:
        value = parse(joined(first, lines), number)
    filled = filter(is_filled, lines)
    if isinstance(value, dict) and "requests" in value:
        yield from of_document(value, next(filled, None))
        return
    yield f" (line {number})", value
    for number, line in filled:
        yield f" (line {number})", parse(line, number)


def is_filled(line: tuple[int, str]) -> bool:
    return not line[1].isspace()


def joined(first: str, lines: Iterator[tuple[int, str]]) -> str:
    """All of a document. Raises ValueError if it is too long."""
    pieces, size = [first], len(first)
    for _, line in lines:
        pieces.append(line)
        size += len(line)
        if size > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES:,} bytes in a document")
    return "".join(pieces)


def of_document(document: dict[str, Any], following: tuple[int, str] | None) -> list[tuple[Place, Any]]:
    """`following` is a line that comes after it."""
    if len(document) > 1:
        raise ValueError(f'beside "requests" there may be nothing else, and there is {shortened([*document])}')
    if following:
        raise ValueError(f'line {following[0]}: after {{"requests": [...]}} there may be nothing else')
    if not isinstance(document["requests"], list):
        raise ValueError(f'"requests" must be a list, not {shortened(document["requests"])}')
    return [("", value) for value in document["requests"]]


def parse(text: str, line: int) -> Any:
    """The value of JSON that begins in this line of the file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {line + error.lineno - 1}, column {error.colno}"
        raise ValueError(f"{where}: no JSON: {error.msg}") from None
    except ValueError as error:  # an integer of thousands of digits
        raise ValueError(f"line {line}: {error}") from None
    except RecursionError:
        raise ValueError(f"line {line}: it is nested too deeply") from None


def numbered_lines(source: Source) -> Iterator[tuple[int, str]]:
    """Each line with its number, from 1. Raises ValueError as soon as it can be no text: /dev/zero never ends."""
    place = 0  # of the line's first byte
    for number, line in enumerate(whole_lines(source), start=1):
        try:
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                raise ValueError("no UTF-8 text: it ends in the middle of a character") from None
            raise ValueError(f"no UTF-8 text: byte {line[error.start]:#04x} in place {place + error.start}") from None
        place += len(line)


def whole_lines(source: Source) -> Iterator[bytes]:
    """As they are, with the newline at the end."""
    pieces: list[bytes] = []
    start = size = 0  # bytes before this piece, and of this line
    while piece := source.readline(PIECE):
        if b"\0" in piece:
            raise ValueError(f"no text: a zero byte among bytes {start:,} to {start + len(piece):,}")
        pieces.append(piece)
        start, size = start + len(piece), size + len(piece)
        if size > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES:,} bytes in a line")
        if piece.endswith(b"\n"):
            yield b"".join(pieces)
            pieces, size = [], 0
    if pieces:
        yield b"".join(pieces)
