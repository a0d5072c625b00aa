"""A ModelRunner for a GPU: decodes as graphs, all other steps kernel by kernel, sampling on the device."""

import torch
from torch import Tensor

from ...api.model_runner import ModelRunner
from ...core.attention import AttentionMetadata, PagedAttention
from ...core.block_manager import cdiv
from ...core.kv_cache import KVCache
from ...core.llama import LlamaForCausalLM
from ...core.model_runner import Scheduled
from .attention import Decodes, KernelAttend, KernelAttention, Pool
from .graphs import Capture, DecodeGraphs, buckets
from .inputs import NO_SLOT, StepInputs
from .layers import swap_in, swap_out
from .ops import Ops
from .sampler import sample_rows

NOTHING = torch.empty(0, dtype=torch.int64)
MULTIPROCESSORS = 132  # where there is no device to ask


class GpuRunner(ModelRunner):
    """Until use_kernels() it does what its parent does."""

    def __init__(
        self, model: LlamaForCausalLM, kv_cache: KVCache, tile_size: int, max_model_len: int, device: torch.device
    ) -> None:
        super().__init__(model, PagedAttention(kv_cache, tile_size), kv_cache.block_size, device)
        self._kv_cache, self._max_model_len = kv_cache, max_model_len
        self._graphs: DecodeGraphs | None = None
        self._logits: Tensor | None = None  # [rows, vocab_size], of a step that a graph has computed

    @torch.inference_mode()
    def use_kernels(self, ops: Ops, capture: Capture | None, max_rows: int, progress: bool = True) -> None:
        """From the next step on. `capture` None: no graphs.

        Raises what compiling and capturing may raise; then all is as before.
        """
        model, rotary = self._model, self._model.model.rotary_emb
        dtype, num_heads = self._kv_cache.blocks.dtype, model.config.num_attention_heads
        cos, sin = rotary.cos.to(dtype), rotary.sin.to(dtype)  # [max_model_len, head_dim]
        pool = Pool(ops, self._kv_cache.blocks, num_heads, cos, sin, num_multiprocessors(self._device))
        attention = KernelAttention(pool, self._kv_cache)
        swap_in(model, ops)
        try:
            self._try(attention)
            if capture is not None:
                self._capture(pool, capture, buckets(max_rows), progress)
        except BaseException:
            self._graphs = None
            swap_out(model)
            raise
        self._attention = attention  # type: ignore[assignment]  # it plans a step, too
        self.sample_rows = sample_rows  # type: ignore[method-assign]

    def _try(self, attention: KernelAttention) -> None:
        """A step of every kernel, on rows of padding, so that a kernel that cannot be compiled fails now.

        Without it the first request would meet the error, or wait for the compiler.
        """
        tables, slots = self._tensor([[0, 0], [0, 0]]), self._tensor([NO_SLOT] * 3)  # block 0 is read, none is written
        step = AttentionMetadata([0, 2, 3], [2, 1], tables, slots, NOTHING)  # a chunk of two tokens, and a decode
        zeros = self._tensor([0, 0, 0])  # [3], the ids and the positions
        self._model.compute_logits(self._model(zeros, zeros, attention.plan(step)))[0, 0].item()  # waits until it ran

    def _capture(self, pool: Pool, capture: Capture, sizes: list[int], progress: bool) -> None:
        max_rows, config = sizes[-1], self._model.config
        max_blocks = cdiv(self._max_model_len, self._block_size)
        self._inputs = StepInputs(max_rows, max_blocks, self._block_size, self._device)
        empty = self._kv_cache.blocks.new_empty
        self._hidden_rows, self._logits_rows = empty(max_rows, config.hidden_size), empty(max_rows, config.vocab_size)
        self._rooms = {rows: pool.decode_room(rows) for rows in sizes}
        self._inputs.fill([])  # nothing but padding
        self._graphs = DecodeGraphs(lambda rows: self._decode_step(pool, rows), sizes, capture, progress)

    def _decode_step(self, pool: Pool, rows: int) -> None:
        """What a graph records: from the inputs' rows to the logits'."""
        inputs, tables = self._inputs.device, self._inputs.block_tables[:rows]
        self._inputs.apply_changes()
        decodes = Decodes(None, tables, inputs.context_lens[:rows], self._rooms[rows])
        attend = KernelAttend(pool, inputs.slot_mapping[:rows], decodes, None)
        hidden = self._model(inputs.input_ids[:rows], inputs.positions[:rows], attend)  # [rows, hidden_size]
        self._hidden_rows[:rows].copy_(hidden)
        torch.mm(hidden, self._model.lm_head.weight.t(), out=self._logits_rows[:rows])

    def compute(self, batch: list[Scheduled]) -> tuple[Tensor, AttentionMetadata]:
        self._logits = None
        is_decode = all(num_tokens == 1 for _, num_tokens in batch)
        if self._graphs is None or not is_decode or len(batch) > self._graphs.max_rows:
            return super().compute(batch)
        rows = self._inputs.fill(batch)
        self._graphs.run(len(batch))
        self.num_steps, self.num_tokens = self.num_steps + 1, self.num_tokens + len(batch)
        hidden, self._logits = self._in_order(self._hidden_rows, rows), self._in_order(self._logits_rows, rows)
        context_lens = [seq.num_computed_tokens + 1 for seq, _ in batch]
        return hidden, AttentionMetadata(list(range(len(batch) + 1)), context_lens, NOTHING, NOTHING, NOTHING)

    def _in_order(self, x: Tensor, rows: list[int]) -> Tensor:
        """Those rows: a view where they are the first in their order. x [max_rows, size] -> [len(rows), size]"""
        if rows == list(range(len(rows))):
            return x[: len(rows)]
        return x.index_select(0, self._inputs.device.order[: len(rows)])  # which came with the step: nothing waits

    def compute_logits(self, hidden: Tensor, step: AttentionMetadata, seqs: list[int]) -> Tensor:
        """[len(seqs), vocab_size]"""
        if self._logits is None:
            return super().compute_logits(hidden, step, seqs)
        return self._logits if len(seqs) == len(self._logits) else self._logits[seqs]


def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
