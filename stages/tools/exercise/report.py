"""The outcome of a test, which reporter.py sends from pytest's process as JSON and check.py prints in words."""

import json
import re
import textwrap
from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class Place:
    """A line of code, and the function that it is in."""

    file: str
    line: int
    name: str
    source: str

    def __str__(self) -> str:
        name = "" if self.name.startswith("test_") else f", {self.name}"
        return f"{self.file}, line {self.line}{name}: {self.source}"


@dataclass(frozen=True)
class Report:
    """The outcome of one test, with the reasons in words if it is red."""

    test: str  # the node id; the file, if it could not be imported
    outcome: str  # "passed", "failed", "skipped" or "broken"
    docstring: str = ""
    params: tuple[str, ...] = ()
    message: str = ""  # of the assert
    result: tuple[str, ...] = ()  # a few short lines: the values compared, or the error raised
    is_open: bool = False  # a function of the exercise is not written yet
    test_line: Place | None = None  # the test's own last line that ran: a helper's says less of what was asked
    calls: tuple[Place, ...] = ()  # the lines of the learner's folder that were running, outermost first
    is_in_given_code: bool = False  # none of these lines is in a function of the exercise; within() finds out

    @property
    def code(self) -> Place | None:
        """The last line of the learner's folder that ran."""
        return self.calls[-1] if self.calls else None

    def within(self, functions: Container[str]) -> "Report":
        """Return the same report, whose code is the last line in one of `functions`, if any of them was running."""
        own = [n for n, place in enumerate(self.calls, 1) if place.name in functions]
        return replace(self, calls=self.calls[: own[-1]]) if own else replace(self, is_in_given_code=True)

    @property
    def is_red(self) -> bool:
        return self.outcome not in ("passed", "skipped")

    @property
    def has_words(self) -> bool:
        """True if the report says more than the test's name, the values compared, or the error raised."""
        has_sentence = bool(self.result) and not re.match(r"assert |\w+(Error|Exception)\b", self.result[0])
        return bool(self.docstring or self.message or has_sentence)

    def is_about(self, test: str) -> bool:
        """Return whether this reports `test` (a node id), one of its parameters, or a file that failed to import."""
        if self.outcome == "broken":
            return test.startswith(self.test)
        return self.test == test or self.test.startswith((f"{test}[", f"{test}::"))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Report":
        fields = json.loads(line)
        fields["test_line"] = Place(**fields["test_line"]) if fields["test_line"] else None
        fields |= {name: tuple(fields[name]) for name in ("params", "result")}  # JSON has lists, which have no hash
        return cls(**fields | {"calls": tuple(Place(**place) for place in fields["calls"])})

    def lines(self) -> list[str]:
        """Return a red test's report for a terminal, one aspect per paragraph."""
        return [line for title, text in self._paragraphs() for line in _wrapped(title, text)]

    def _paragraphs(self) -> Iterator[tuple[str, str]]:
        yield "the test", self.test.partition("[")[0]
        if self.outcome != "broken":
            yield "expected", as_sentence(self.test)
        yield from (("", " ".join(each.split())) for each in self.docstring.split("\n\n") if each.strip())
        if self.params:
            yield "with", ", ".join(self.params)
        if self.message:
            yield "because", self.message
        if self.is_open and self.code:
            yield "result", f"{self.code.name} is not written yet: {self.code.file}, line {self.code.line}"
        else:
            yield from (("result" if n == 0 else "", line) for n, line in enumerate(self.result))
        if self.test_line:
            yield "asked in", str(self.test_line)
        if self.code and not self.is_open:
            yield "given code" if self.is_in_given_code else "your code", str(self.code)


def as_sentence(test: str) -> str:
    """Return a test's name as a sentence.

    >>> as_sentence("tests/test_pool.py::TestTake::test_block_0_is_taken_first[4-a]")
    'Block 0 is taken first.'
    """
    name = re.split(r"::", test.partition("[")[0])[-1].removeprefix("test_").replace("_", " ")
    return name[:1].upper() + name[1:] + "."


def _wrapped(title: str, text: str) -> list[str]:
    """Return a title and its text, wrapped for a terminal."""
    wrapper = textwrap.TextWrapper(110, break_on_hyphens=False, break_long_words=False)
    wrapper.initial_indent, wrapper.subsequent_indent = f"  {title:10} ", " " * 13
    return wrapper.wrap(text)
