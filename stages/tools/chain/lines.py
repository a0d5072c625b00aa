"""Lines of code, and how many of them a stage adds: budgets keep a lesson small enough to read."""

import io
import tokenize
from difflib import SequenceMatcher

from .model import ChainError, Stage, is_free

LAYOUT = (tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(source: str) -> list[str]:
    r'''Return the lines of a Python file without blank lines, comments and docstrings.

    >>> code_lines('"""A docstring."""\n\nx = 1  # why\n# a note\ny = """\n  text\n"""\n')
    ['x = 1', 'y = """', '  text', '"""']
    '''
    lines = source.split("\n")
    kept: set[int] = set()
    statement: list[tokenize.TokenInfo] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            row, column = token.start
            if token.type == tokenize.COMMENT:
                lines[row - 1] = lines[row - 1][:column].rstrip()
            elif token.type == tokenize.NEWLINE:
                if any(part.type != tokenize.STRING for part in statement):  # else it is a docstring
                    kept.update(range(statement[0].start[0], statement[-1].end[0] + 1))
                statement = []
            elif token.type not in LAYOUT:
                statement.append(token)
    except (tokenize.TokenError, SyntaxError) as error:
        raise ChainError(f"not a Python file: {error.args[0]}") from None
    return [lines[row - 1] for row in sorted(kept) if lines[row - 1].strip()]


def added_lines(stage: Stage) -> int:
    """Return how many lines of code a stage adds to the previous stage. The first stage adds all its lines.

    Blank lines, comments, docstrings, prose, tests and optional files do not count.
    """
    files = stage.files() - {*stage.optional.files}
    return sum(added_in(stage, file) for file in files if not is_free(file))


def optional_lines(stage: Stage) -> int:
    """Return how many lines of code a stage adds in its optional files."""
    return sum(added_in(stage, file) for file in stage.optional.files)


def added_in(stage: Stage, file: str) -> int:
    """Return how many lines of code a stage adds in one file. Raise ChainError if a .py file is not Python."""
    now = stage.text(file)
    before = stage.before.text(file) if stage.before else ""
    if now == before:
        return 0
    lines_of = code_lines if file.endswith(".py") else _filled_lines
    try:
        matcher = SequenceMatcher(None, lines_of(before), lines_of(now), autojunk=False)
    except ChainError as error:
        raise ChainError(f"{stage.path}/{file}: {error}") from None
    return sum(end - start for tag, _, _, start, end in matcher.get_opcodes() if tag in ("insert", "replace"))


def _filled_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]
