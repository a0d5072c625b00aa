"""A ModelRunner that takes the fast path for a step: of few rows, or of many."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..api.model_runner import ModelRunner
from ..core.attention import AttentionMetadata
from ..core.kv_cache import KVCache
from ..core.llama import LlamaForCausalLM
from ..core.model_runner import Scheduled
from ..core.sampling import SampledToken

if TYPE_CHECKING:  # the engine's runner also where there is no numba
    from .few_rows import FewRows

NOTHING = torch.empty(0, dtype=torch.int64)


class KernelRunner(ModelRunner):
    """Without `few` it does what its parent does."""

    few: "FewRows | None" = None
    _was_few = False  # in the step that is being computed

    def __init__(self, *parts: Any, kv_cache: KVCache, max_model_len: int) -> None:
        super().__init__(*parts)
        self._kv_cache, self._max_model_len = kv_cache, max_model_len

    def use_kernels(self) -> None:
        """From now on. All entries are compiled, and no request is there."""
        from .few_rows import MAX_ROWS, FewRows

        self._max_rows = MAX_ROWS
        self.few = FewRows(self._model, self._kv_cache, self._max_model_len)

    def drop_kernels(self) -> None:
        """Back to plain operations."""
        self.few = None

    def compute(self, batch: list[Scheduled]) -> tuple[Tensor, AttentionMetadata]:
        self._was_few = (
            self.few is not None and len(batch) <= self._max_rows and all(num_tokens == 1 for _, num_tokens in batch)
        )
        return self._compute_few(batch) if self._was_few else super().compute(batch)

    def _compute_few(self, batch: list[Scheduled]) -> tuple[Tensor, AttentionMetadata]:
        token_ids = [seq.token_ids[seq.num_computed_tokens] for seq, _ in batch]
        context_lens = [seq.num_computed_tokens + 1 for seq, _ in batch]
        hidden, self._logits = self.few.run(token_ids, [seq.block_table for seq, _ in batch], context_lens)
        self.num_steps, self.num_tokens = self.num_steps + 1, self.num_tokens + len(batch)
        step = AttentionMetadata(list(range(len(batch) + 1)), context_lens, NOTHING, NOTHING, NOTHING)
        return hidden, step

    def compute_logits(self, hidden: Tensor, step: AttentionMetadata, seqs: list[int]) -> Tensor:
        """[len(seqs), vocab_size]"""
        if not self._was_few:
            return super().compute_logits(hidden, step, seqs)
        return self._logits if len(seqs) == len(hidden) else self._logits[seqs]

    def sample(self, batch: list[Scheduled], hidden: Tensor, step: AttentionMetadata) -> list[SampledToken | None]:
        if not self._was_few:
            return super().sample(batch, hidden, step)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # torch's other thread would go on spinning, on the core of a helper
        try:
            return super().sample(batch, hidden, step)
        finally:
            torch.set_num_threads(threads)


def refusal(model: LlamaForCausalLM, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why kernels cannot serve this model; None: they can."""
    return None if device.type == "cpu" else f"kernels are for the CPU, the device is {device}"
