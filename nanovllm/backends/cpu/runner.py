"""A ModelRunner that computes with kernels: decodes of few rows in one call, all else on swapped submodules.

Numba is imported when kernels are taken up, not before: this is the engine's runner also where there is none.
"""

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...api.model_runner import ModelRunner
from ...engine.kv_cache import KVCache
from ...engine.sampling_params import SampledToken
from ...llama import LlamaForCausalLM
from ..torch.attention import AttentionMetadata, PagedAttention
from ..torch.model_runner import Scheduled
from .threads import numba_threads

if TYPE_CHECKING:
    from .few_rows import FewRows

NOTHING = torch.empty(0, dtype=torch.int64)


class KernelRunner(ModelRunner):
    """Until use_kernels() it does what its parent does."""

    def __init__(
        self, model: LlamaForCausalLM, kv_cache: KVCache, tile_size: int, max_model_len: int, device: torch.device
    ) -> None:
        super().__init__(model, PagedAttention(kv_cache, tile_size), kv_cache.block_size, device)
        self._kv_cache, self._max_model_len, self._plain_attention = kv_cache, max_model_len, self._attention
        self._few: FewRows | None = None
        self._logits: Tensor | None = None  # [rows, vocab_size], of a step of few rows

    def use_kernels(self) -> None:
        """From the next step on. All of them are compiled, and no request is there.

        Raises what packing the weights may raise, MemoryError for one; then all is as before.
        """
        from .few_rows import FewRows
        from .many_rows import swap_in, swap_out
        from .sampler import sample_rows

        with numba_threads() as workers:
            try:
                attention = swap_in(self._model, self._kv_cache, workers)
                self._few = FewRows(self._model, self._kv_cache, self._max_model_len)
            except BaseException:
                swap_out(self._model)
                raise
        # it plans a step as PagedAttention does
        self._attention, self.sample_rows = attention, sample_rows  # type: ignore[assignment]

    def drop_kernels(self) -> None:
        """Back to plain operations."""
        from .many_rows import swap_out

        self._few, self._logits, self._attention = None, None, self._plain_attention
        del self.sample_rows
        swap_out(self._model)

    def compute(self, batch: list[Scheduled]) -> tuple[Tensor, AttentionMetadata]:
        self._logits = None
        if self._few is None:
            return super().compute(batch)
        if len(batch) <= self._few.max_rows and all(num_tokens == 1 for _, num_tokens in batch):
            return self._compute_few(batch)
        with numba_threads():
            return super().compute(batch)

    def _compute_few(self, batch: list[Scheduled]) -> tuple[Tensor, AttentionMetadata]:
        token_ids = [seq.token_ids[seq.num_computed_tokens] for seq, _ in batch]
        context_lens = [seq.num_computed_tokens + 1 for seq, _ in batch]
        self._clear_new_blocks(batch)
        hidden, self._logits = self._few.run(token_ids, [seq.block_table for seq, _ in batch], context_lens)
        self.num_steps, self.num_tokens = self.num_steps + 1, self.num_tokens + len(batch)
        return hidden, AttentionMetadata(list(range(len(batch) + 1)), context_lens, NOTHING, NOTHING, NOTHING)

    def _clear_new_blocks(self, batch: list[Scheduled]) -> None:
        """Kernels read what was written; plain operations, which may take over, read the rest of a block, too."""
        size = self._kv_cache.block_size
        firsts = [seq for seq, _ in batch if seq.num_computed_tokens % size == 0]
        if firsts:
            new = [seq.block_table[seq.num_computed_tokens // size] for seq in firsts]
            self._kv_cache.clear(torch.tensor(new))

    def compute_logits(self, hidden: Tensor, step: AttentionMetadata, seqs: list[int]) -> Tensor:
        """[len(seqs), vocab_size]"""
        if self._few is None:
            return super().compute_logits(hidden, step, seqs)
        if self._logits is None:
            with numba_threads():  # beams ask for them outside of sample()
                return super().compute_logits(hidden, step, seqs)
        return self._logits if len(seqs) == len(self._logits) else self._logits[seqs]

    def sample(self, batch: list[Scheduled], hidden: Tensor, step: AttentionMetadata) -> list[SampledToken | None]:
        if self._few is None:
            return super().sample(batch, hidden, step)
        with one_thread(self._logits is not None), numba_threads():
            return super().sample(batch, hidden, step)


@contextmanager
def one_thread(is_wanted: bool) -> Any:
    """For torch: its other threads would go on spinning for a while, on the core where a helper works."""
    threads = torch.get_num_threads()
    if is_wanted and threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if is_wanted and threads > 1:
            torch.set_num_threads(threads)


def refusal(model: LlamaForCausalLM, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why kernels cannot serve this model; None: they can."""
    return None if device.type == "cpu" else f"kernels are for the CPU, the device is {device}"
