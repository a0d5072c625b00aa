"""The backend of a GPU: decodes as graphs, all other steps kernel by kernel, sampling on the device."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...llama import LlamaForCausalLM
from ..torch.attention import AttentionMetadata
from ..torch.backend import Computed
from ..torch.sampler import SampledToken, SamplingRow
from .attention import KernelAttention, Pool
from .decodes import Decoded, GraphedDecodes
from .graphs import Capture, buckets
from .layers import swap_in, swap_out
from .linear import Linears, Timer, linear_layers
from .ops import Ops
from .sampler import sample_rows
from .split import LikeliestRoom
from .trial import try_kernels

if TYPE_CHECKING:
    from ...engine.executor import Scheduled
    from ...engine.kv_cache import KVCache

MULTIPROCESSORS = 132  # where there is no device to ask


class TritonBackend:
    """Kernels, and CUDA graphs of them. It shares its model, whose layers it swaps, with the plain backend."""

    @torch.inference_mode()
    def __init__(
        self,
        model: LlamaForCausalLM,
        kv_cache: "KVCache",
        max_model_len: int,
        ops: Ops,
        capture: Capture | None,
        max_rows: int,
        timer: Timer | None = None,
        progress: bool = True,
    ) -> None:
        """`capture` None: no graphs. With a timer, linear layers of few rows are timed too.

        Raise what compiling and capturing may raise: nothing changes then.
        """
        self._model, self._ops, self._device = model, ops, kv_cache.blocks.device
        self._decodes: GraphedDecodes | None = None
        self._decoded: Decoded | None = None  # by the newest step, if it was a graph
        rotary, dtype, num_heads = model.model.rotary_emb, kv_cache.blocks.dtype, model.config.num_attention_heads
        cos, sin = rotary.cos.to(dtype), rotary.sin.to(dtype)  # [max_model_len, head_dim]
        pool = Pool(ops, kv_cache.blocks, num_heads, cos, sin, num_multiprocessors(self._device))
        self._attention = KernelAttention(pool, kv_cache)
        linears = Linears(ops)
        swap_in(model, ops, linears)
        try:
            with on_device(self._device):
                try_kernels(model, pool, self._attention)
                if capture is not None:
                    sizes = buckets(max_rows)
                    if timer is not None:
                        linears.choose(linear_layers(model), sizes, capture, timer)
                    self._decodes = GraphedDecodes(model, linears, pool, max_model_len, sizes, capture, progress)
        except BaseException:
            swap_out(model)
            raise

    def close(self) -> None:
        swap_out(self._model)

    def decode(self, batch: "list[Scheduled]") -> Computed | None:
        self._decoded = None
        is_decode = all(num_tokens == 1 for _, num_tokens in batch)
        if self._decodes is None or not is_decode or len(batch) > self._decodes.max_rows:
            return None
        with on_device(self._device):
            self._decoded = self._decodes.run(batch)
        return Computed(self._decoded.hidden, list(range(len(batch) + 1)), self._decoded.logits)

    def forward(self, input_ids: Tensor, positions: Tensor, step: AttentionMetadata) -> Tensor:
        with on_device(self._device):
            return self._model(input_ids, positions, self._attention.plan(step))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._model.compute_logits(hidden)

    def sampling(self, computed: Computed) -> AbstractContextManager[None]:
        return on_device(self._device)

    def sample(self, logits: Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
        """`logits` are those of the newest step, or what processors have made of them. [num_rows, vocab_size]"""
        if not rows:
            return []
        if self._decoded is not None and self._decodes is not None and logits is self._decoded.logits:
            return sample_rows(logits, self._decoded.likeliest, rows, meanwhile=self._decodes.inputs.prepare)
        likeliest = logits.new_empty(len(logits), 3, dtype=torch.float32)
        self._ops.find_likeliest(logits, LikeliestRoom(len(logits), logits.shape[1], logits.device), likeliest)
        return sample_rows(logits, likeliest, rows)


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Return the context that kernels and graphs are started in.

    The current device of a thread is 0, and they would start there, wherever their tensors are.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
