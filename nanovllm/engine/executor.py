"""Executor: the seam between the engine, which decides what to compute, and the hardware that computes it.

    pending = executor.launch(scheduled)        step n runs
    another = executor.launch(scheduled)        step n + 1 may start before anybody reads the tokens of step n
    pending.tokens()                            waits for step n

An executor may run a model in this process (backends/), on several ranks, or nothing at all (tests).
"""

from typing import Protocol

from ..backends.torch.sampler import SampledToken
from .sequence import Sequence

Scheduled = tuple[Sequence, int]  # a sequence, and how many of its tokens to compute in this step


class Pending(Protocol):
    """A step that was launched."""

    def tokens(self) -> list[SampledToken | None]:
        """Wait for the step, and return one item for each scheduled one, in order. Call it once.

        None stands for a sequence that has more tokens to compute before one can be sampled. Raise what the step
        raised: then no sequence has changed, and the slots of this step may be written again.
        """
        ...


class Executor(Protocol):
    def launch(self, scheduled: list[Scheduled]) -> Pending:
        """Start a step. The sequences may change before its tokens are read: the executor takes what it needs now.

        Steps run in the order in which they were launched. A sequence may be listed several times in a row, to get
        several rows of logits: each item continues where the one before it ends, and has a token of its own.
        """
        ...
