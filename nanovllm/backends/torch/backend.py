"""Backend: how a ModelRunner computes. The plain one calls torch's operations; cpu/ and gpu/ have one with kernels."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from ...llama import LlamaForCausalLM
from .attention import AttentionMetadata, PagedAttention
from .sampler import SampledToken, SamplingRow, sample

if TYPE_CHECKING:
    from ...engine.executor import Scheduled


class Computed(NamedTuple):
    """A step of the model. Sequence i has rows query_start_loc[i] .. query_start_loc[i + 1] - 1 of `hidden`."""

    hidden: Tensor  # [num_tokens, hidden_size]
    query_start_loc: list[int]  # [num_seqs + 1]
    logits: Tensor | None = None  # [num_seqs, vocab_size], if decode() computed them along with the hidden states


class Backend(Protocol):
    """The parts of a step. Set ModelRunner.backend only while no request is being served."""

    def decode(self, batch: "list[Scheduled]") -> Computed | None:
        """Compute a step of one token for each sequence, faster than forward(). Return None for any other step."""
        ...

    def forward(self, input_ids: Tensor, positions: Tensor, step: AttentionMetadata) -> Tensor:
        """Return the hidden states of any step. input_ids, positions int64 [num_tokens] -> [num_tokens, hidden_size]"""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of these rows. hidden [num_rows, hidden_size] -> [num_rows, vocab_size]"""
        ...

    def sampling(self, computed: Computed) -> AbstractContextManager[None]:
        """Return the context that everything after the model runs in: a number of threads, a device."""
        ...

    def sample(self, logits: Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
        """Sample one token for each row, as sampler.sample() does. logits [num_rows, vocab_size]"""
        ...

    def close(self) -> None:
        """Leave the model as it was before this backend."""
        ...


class TorchBackend:
    """Plain operations, on any device."""

    def __init__(self, model: LlamaForCausalLM, attention: PagedAttention) -> None:
        self._model = model
        self._attention = attention

    def decode(self, batch: "list[Scheduled]") -> None:
        return None

    def forward(self, input_ids: Tensor, positions: Tensor, step: AttentionMetadata) -> Tensor:
        return self._model(input_ids, positions, self._attention.plan(step))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._model.compute_logits(hidden)

    def sampling(self, computed: Computed) -> AbstractContextManager[None]:
        return nullcontext()

    def sample(self, logits: Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
        return sample(logits, rows)

    def close(self) -> None:
        pass
