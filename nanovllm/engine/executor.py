"""Executor: the interface between the engine, which decides what to compute, and the hardware that computes it.

    pending = executor.launch(batch)            step n runs
    next_pending = executor.launch(next_batch)  step n + 1 may start before the tokens of step n are read
    pending.tokens()                            waits for step n

An executor may run a model in this process (backends/) or on several ranks. Tests use executors without a model.
"""

from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor

from ..requests.tokens import StepOutput
from .sequence import Sequence

Scheduled = tuple[Sequence, int]  # a sequence, and how many of its tokens to compute in this step


class Pending(Protocol):
    """A step that was launched."""

    def tokens(self) -> StepOutput:
        """Wait for the step, and return a row for each item of the batch, in order. Call it once.

        A row is the sampled token, the embedding of a prompt with pooling_params, or nothing if the sequence has more
        tokens to compute first. If the step failed, raise its error: then no sequence has changed, and the slots of the
        step may be written again.
        """
        ...


def with_drafts(batch: list[Scheduled]) -> list[Scheduled]:
    """Return a batch with one more item for each token of a draft, to get a row of logits for each."""
    if not any([seq.draft_token_ids for seq, _ in batch]):
        return batch
    return [item for seq, num_tokens in batch for item in [(seq, num_tokens), *[(seq, 1)] * len(seq.draft_token_ids)]]


def must_read_first(batch: list[Scheduled]) -> bool:
    """Return whether the host must read this step before it launches the next one."""
    return any([seq.must_read_first for seq, _ in batch if not seq.is_plain])


@dataclass
class InFlight:
    """A step that was launched, but not read yet."""

    batch: list[Scheduled]
    pending: Pending
    num_decodes: int = 0  # the first items of the batch: each computes the last token of its sequence


class Executor(Protocol):
    """A model, and the hardware that it runs on."""

    num_steps: int
    num_tokens: int  # computed since the start

    def launch(self, batch: list[Scheduled], num_decodes: int = 0) -> Pending:
        """Start a step. Its first `num_decodes` items are decodes: each computes the last token of another sequence.

        Copy what is needed from the sequences, since they may change before the tokens are read.

        Steps run in the order of their launches, and some are never read. A sequence whose newest token has not been
        read yet has a placeholder for it: launch() sets its placeholder_id, and the next launch() must know which token
        the placeholder stands for. A sequence may have several consecutive items, to get several rows of logits: each
        item continues where the previous one ends, and has its own result. Items after the first one compute the tokens
        of the sequence's draft.
        """
        ...

    def next_logits(self, batch: list[Scheduled]) -> Tensor:
        """Run a step without sampling. Return the logits after the last token of each item, [batch size, vocab_size].

        Raise ValueError if the executor cannot return logits.
        """
        ...


class FinishedStep:
    """A Pending for a step that launch() has already run."""

    def __init__(self, tokens: StepOutput, error: Exception | None = None) -> None:
        self._tokens, self._error = tokens, error

    @classmethod
    def failed(cls, error: Exception) -> Self:
        """Return a step that raises an error when it is read."""
        return cls(StepOutput([], []), error)

    def tokens(self) -> StepOutput:
        """Return the step's tokens, or raise its error. Call it once."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame: the cycle would keep the step's tensors alive
        return self._tokens


class Kernels:
    """The choice between compiled kernels and plain operations of PyTorch. Only the engine's thread calls its methods.

    On a CPU, kernels may be compiled while requests run on plain operations; the engine switches once no request is
    running. This base class never switches. CpuChoice and GpuChoice (../backends) extend it.
    """

    uses_kernels = False

    def __init__(self, reason: str | None) -> None:
        self.reason = reason  # why there are no kernels, or no CUDA graphs

    @property
    def description(self) -> str:
        """Describe the choice in a few words, for a command's summary or the server's log."""
        return f"plain operations: {self.reason}"

    @property
    def awaits_idle(self) -> bool:
        """Return whether kernels have been compiled, and will be used once no request is running."""
        return False

    def switch_when_ready(self) -> None:
        """Switch to the kernels if they have been compiled in the meantime. No request may be running."""

    def wait(self, seconds: float) -> None:
        """If the compiler is still running, log that, and wait for at most `seconds`."""

    def close(self) -> None:
        """Stop the compiler if it is still running."""
