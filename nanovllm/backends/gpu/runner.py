"""A ModelRunner for a GPU: decodes as graphs, all other steps kernel by kernel, sampling on the device."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ...api.model_runner import ModelRunner
from ...engine.kv_cache import KVCache
from ...engine.sampling_params import SampledToken, SamplingRow
from ...llama import LlamaForCausalLM
from ..torch.attention import AttentionMetadata, PagedAttention
from ..torch.model_runner import Scheduled
from .attention import KernelAttention, Pool
from .decodes import Decoded, GraphedDecodes
from .graphs import Capture, buckets
from .layers import swap_in, swap_out
from .linear import Linears, Timer, linear_layers
from .ops import Ops
from .sampler import sample_rows
from .split import LikeliestRoom
from .trial import try_kernels

NOTHING = torch.empty(0, dtype=torch.int64)
MULTIPROCESSORS = 132  # where there is no device to ask


def on_its_device(method: Callable[..., Any]) -> Callable[..., Any]:
    """A thread's current device is 0: kernels and graphs start there, wherever their tensors are, unless told."""

    @wraps(method)
    def there(self: Any, *args: Any, **named: Any) -> Any:
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            return method(self, *args, **named)

    return there


class GpuRunner(ModelRunner):
    """Until use_kernels() it does what its parent does."""

    def __init__(
        self, model: LlamaForCausalLM, kv_cache: KVCache, tile_size: int, max_model_len: int, device: torch.device
    ) -> None:
        super().__init__(model, PagedAttention(kv_cache, tile_size), kv_cache.block_size, device)
        self._kv_cache, self._max_model_len = kv_cache, max_model_len
        self._decodes: GraphedDecodes | None = None
        self._decoded: Decoded | None = None  # of this step, if a graph computes it

    @on_its_device
    @torch.inference_mode()
    def use_kernels(
        self, ops: Ops, capture: Capture | None, max_rows: int, timer: Timer | None = None, progress: bool = True
    ) -> None:
        """From the next step on. `capture` None: no graphs. With a timer linear layers of few rows are timed, too.

        Raises what compiling and capturing may raise; then all is as before.
        """
        model, rotary = self._model, self._model.model.rotary_emb
        dtype, num_heads = self._kv_cache.blocks.dtype, model.config.num_attention_heads
        cos, sin = rotary.cos.to(dtype), rotary.sin.to(dtype)  # [max_model_len, head_dim]
        pool = Pool(ops, self._kv_cache.blocks, num_heads, cos, sin, num_multiprocessors(self._device))
        attention = KernelAttention(pool, self._kv_cache)
        linears = Linears(ops)
        swap_in(model, ops, linears)
        try:
            try_kernels(model, pool, attention)
            if capture is not None:
                sizes = buckets(max_rows)
                if timer is not None:
                    linears.choose(linear_layers(model), sizes, capture, timer)
                self._decodes = GraphedDecodes(model, linears, pool, self._max_model_len, sizes, capture, progress)
        except BaseException:
            swap_out(model)
            raise
        self._ops, self._attention = ops, attention  # type: ignore[assignment]  # it plans a step, too
        self.sample_rows = self._sample_rows  # type: ignore[method-assign]

    @on_its_device
    def compute(self, batch: list[Scheduled]) -> tuple[Tensor, AttentionMetadata]:
        self._decoded = None
        is_decode = all(num_tokens == 1 for _, num_tokens in batch)
        if self._decodes is None or not is_decode or len(batch) > self._decodes.max_rows:
            return super().compute(batch)
        self._decoded = self._decodes.run(batch)
        self.num_steps, self.num_tokens = self.num_steps + 1, self.num_tokens + len(batch)
        context_lens = [seq.num_computed_tokens + 1 for seq, _ in batch]
        step = AttentionMetadata(list(range(len(batch) + 1)), context_lens, NOTHING, NOTHING, NOTHING)
        return self._decoded.hidden, step

    def _tensor(self, values: list) -> Tensor:
        """int64, in a copy that the host does not wait for: core's waits until the device has done all before it."""
        host = torch.tensor(values, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        return host.to(self._device, non_blocking=True)

    def compute_logits(self, hidden: Tensor, step: AttentionMetadata, seqs: list[int]) -> Tensor:
        """[len(seqs), vocab_size]"""
        if self._decoded is None:
            return super().compute_logits(hidden, step, seqs)
        return self._decoded.logits if len(seqs) == len(hidden) else self._decoded.logits[seqs]

    @on_its_device
    def _sample_rows(self, logits: Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
        """logits [num_rows, vocab_size], of this step's model or what processors have made of them"""
        if not rows:
            return []
        if self._decoded is not None and self._decodes is not None and logits is self._decoded.logits:
            return sample_rows(logits, self._decoded.told, rows, meanwhile=self._decodes.inputs.prepare)
        told = logits.new_empty(len(logits), 3, dtype=torch.float32)
        self._ops.find_likeliest(logits, LikeliestRoom(len(logits), logits.shape[1], logits.device), told)
        return sample_rows(logits, told, rows)


def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
