"""What the user says: at a prompt with a history, or from a pipe, a message a line."""

import io
import sys
from collections.abc import Iterator
from contextlib import suppress

from .streams import MAX_PROMPT_CHARACTERS

PROMPT, MORE = "> ", "… "


def messages() -> Iterator[str]:
    """Until the input ends. A backslash at the end of a line goes on in the next one."""
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if at_terminal:
        with suppress(ImportError):  # not on every platform
            import readline  # noqa: F401  # input() then has a history, and keys to edit a line
    else:
        keep_bytes()
    lines: list[str] = []
    while (line := next_line(MORE if lines else PROMPT, at_terminal)) is not None:
        if line.endswith("\\"):
            lines.append(line[:-1])
            continue
        yield "\n".join([*lines, line])
        lines = []
    if lines:
        yield "\n".join(lines)


def next_line(prompt: str, at_terminal: bool) -> str | None:
    """Without its newline; None at the end. Raises OSError for a line that never ends."""
    if at_terminal:
        try:
            return input(prompt)
        except EOFError:
            sys.stdout.write("\n")  # Ctrl-D has left the cursor behind the prompt
            return None
    line = sys.stdin.readline(MAX_PROMPT_CHARACTERS + 1)
    if len(line) > MAX_PROMPT_CHARACTERS:
        raise OSError(f"standard input has a line of more than {MAX_PROMPT_CHARACTERS:,} characters")
    return line.rstrip("\n") if line else None


def check_text(message: str) -> None:
    """Raises ValueError for half a character, such as keep_bytes() makes."""
    if any("\ud800" <= letter <= "\udfff" for letter in message):
        raise ValueError(f"this is no {sys.stdin.encoding} text")


def keep_bytes() -> None:
    """A byte that is no text becomes half a character, and its message is refused: the others are answered."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
