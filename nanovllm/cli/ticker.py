"""A line about the engine on standard error, each so many seconds, while it works."""

import sys
import time
from collections.abc import Generator
from contextlib import closing, suppress

from tqdm import tqdm

from ..engine.outputs import RequestOutput
from ..llm import LLM


class Ticker:
    def __init__(self, llm: LLM, seconds: float | None) -> None:
        """Without `seconds` nothing is told."""
        self._llm, self._seconds, self._next = llm, seconds, time.perf_counter()

    def tick(self) -> None:
        """Called between steps: it tells its line if that is due."""
        if self._seconds is not None and time.perf_counter() >= self._next:
            self._next = time.perf_counter() + self._seconds
            with suppress(OSError):  # nobody reads it: that is no error of the command
                tqdm.write(str(self._llm.stats()), file=sys.stderr)  # a progress bar steps aside


def ticking(
    llm: LLM, outputs: Generator[RequestOutput, None, None], seconds: float | None
) -> Generator[RequestOutput, None, None]:
    """The outputs, with the engine's state between them.

    Where both are seen in one terminal, a story comes whole: no line may break into it.
    """
    ticker = Ticker(llm, seconds)
    is_whole = seconds is not None and sys.stdout.isatty() and sys.stderr.isatty()
    with closing(outputs):
        for output in outputs:
            ticker.tick()
            if output.finished or not is_whole:
                yield output
