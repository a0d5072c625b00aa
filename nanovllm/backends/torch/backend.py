"""The interface that computes a ModelRunner's steps, and its plain version. cpu/ and gpu/ implement it with kernels."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from ...llama import LlamaForCausalLM
from .attention import AttentionMetadata, PagedAttention
from .sampler import SampledToken, SamplingRow, sample

if TYPE_CHECKING:
    from ...engine.executor import Scheduled


class Computed(NamedTuple):
    """The result of a step. Sequence i owns rows query_start_loc[i] .. query_start_loc[i + 1] - 1 of `hidden`."""

    hidden: Tensor  # [num_tokens, hidden_size]
    query_start_loc: list[int]  # [num_seqs + 1]
    logits: Tensor | None = None  # [num_seqs, vocab_size], if decode() computed them too


class Backend(Protocol):
    """The parts of a step. Replace ModelRunner.backend only while no request is running."""

    def decode(self, batch: "list[Scheduled]") -> Computed | None:
        """Compute a step of one token per sequence, faster than forward() would. Return None for any other step."""
        ...

    def forward(self, input_ids: Tensor, positions: Tensor, step: AttentionMetadata) -> Tensor:
        """Return the hidden states [num_tokens, hidden_size] of any step.

        `input_ids` and `positions` are int64 [num_tokens].
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [num_rows, vocab_size] of `hidden` [num_rows, hidden_size]."""
        ...

    def sampling(self, computed: Computed) -> AbstractContextManager[None]:
        """Return the context in which everything after the model runs, such as a thread count or a device."""
        ...

    def sample(self, logits: Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
        """Sample one token for each row of `logits` [num_rows, vocab_size], as sampler.sample() does."""
        ...

    def close(self) -> None:
        """Restore the model to its state before this backend."""
        ...


class TorchBackend:
    """A Backend of plain PyTorch operations, for any device."""

    def __init__(self, model: LlamaForCausalLM, attention: PagedAttention) -> None:
        self._model = model
        self._attention = attention

    def decode(self, batch: "list[Scheduled]") -> None:
        return None

    def forward(self, input_ids: Tensor, positions: Tensor, step: AttentionMetadata) -> Tensor:
        hidden: Tensor = self._model(input_ids, positions, self._attention.plan(step))
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._model.compute_logits(hidden)

    def sampling(self, computed: Computed) -> AbstractContextManager[None]:
        return nullcontext()

    def sample(self, logits: Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
        return sample(logits, rows)

    def close(self) -> None:
        pass
