"""The backend with kernels: decodes of few rows are one call, everything else runs on swapped submodules of the model.

It is imported by choice.py where there is no Numba too, so what is compiled is imported when it is built.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...llama import LlamaForCausalLM
from ..torch.attention import AttentionMetadata
from ..torch.backend import Computed
from ..torch.sampler import SampledToken, SamplingRow
from .threads import numba_threads

if TYPE_CHECKING:
    from ...engine.executor import Scheduled
    from ...engine.kv_cache import KVCache


class NumbaBackend:
    """Numba's kernels. It shares its model, whose submodules it swaps, with the plain backend: one of them computes."""

    def __init__(self, model: LlamaForCausalLM, kv_cache: "KVCache", max_model_len: int) -> None:
        """Swap submodules of `model`. All kernels are compiled already.

        Raise what packing the weights may raise, MemoryError for one: nothing changes then.
        """
        from .few_rows import FewRows
        from .many_rows import swap_in, swap_out
        from .sampler import sample_rows

        self._model, self._kv_cache, self._sample_rows = model, kv_cache, sample_rows
        with numba_threads() as workers:
            try:
                self._attention = swap_in(model, kv_cache, workers)
                self._few = FewRows(model, kv_cache, max_model_len)
            except BaseException:
                swap_out(model)
                raise

    def close(self) -> None:
        from .many_rows import swap_out

        swap_out(self._model)

    def decode(self, batch: "list[Scheduled]") -> Computed | None:
        if len(batch) > self._few.max_rows or any(num_tokens > 1 for _, num_tokens in batch):
            return None
        token_ids = [seq.token_ids[seq.num_computed_tokens] for seq, _ in batch]
        context_lens = [seq.num_computed_tokens + 1 for seq, _ in batch]
        self._clear_new_blocks(batch)
        hidden, logits = self._few.run(token_ids, [seq.block_table for seq, _ in batch], context_lens)
        return Computed(hidden, list(range(len(batch) + 1)), logits)

    def _clear_new_blocks(self, batch: "list[Scheduled]") -> None:
        """Kernels read only what was written; plain operations, which may take over, read the rest of a block too."""
        size = self._kv_cache.block_size
        firsts = [seq for seq, _ in batch if seq.num_computed_tokens % size == 0]
        if firsts:
            new = [seq.block_table[seq.num_computed_tokens // size] for seq in firsts]
            self._kv_cache.clear(torch.tensor(new))

    def forward(self, input_ids: Tensor, positions: Tensor, step: AttentionMetadata) -> Tensor:
        with numba_threads():
            return self._model(input_ids, positions, self._attention.plan(step))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        with numba_threads():
            return self._model.compute_logits(hidden)

    def sampling(self, computed: Computed) -> AbstractContextManager[None]:
        return numba_and_torch_threads(is_one=computed.logits is not None)

    def sample(self, logits: Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
        return self._sample_rows(logits, rows)


@contextmanager
def numba_and_torch_threads(is_one: bool) -> Iterator[None]:
    """Run both with torch's number of threads, or with one.

    After a decode it is one: torch's other threads would spin for a while, on the core where a helper works.
    """
    threads = torch.get_num_threads()
    if is_one and threads > 1:
        torch.set_num_threads(1)
    try:
        with numba_threads():
            yield
    finally:
        if is_one and threads > 1:
            torch.set_num_threads(threads)


def refusal(device: torch.device) -> str | None:
    """Return why kernels cannot be used on this device, or None."""
    return None if device.type == "cpu" else f"kernels are for the CPU, the device is {device}"
