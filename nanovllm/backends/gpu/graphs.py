"""CUDA graphs of decode steps: one launch per step. A few batch sizes (buckets) have a graph each.

A plain step of a small model launches about a thousand kernels, and each takes longer to launch on the host than to run
on the device. A graph is recorded once and replayed with a single call: it runs the same kernels on the same addresses.
So inputs live in StepInputs, outputs in tensors that all graphs share, and a batch is padded to the next bucket.
"""

import bisect
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ...engine.executor import Scheduled
from ...llama import LlamaForCausalLM
from .attention import KernelAttend, KernelContext
from .capture import Capture, Launcher
from .inputs import StepInputs, sampling_params
from .model import FusedModel, LinearDispatch
from .plain import DecodeMetadata
from .tiles import SamplingWorkspace

MAX_ROWS = 512  # larger batches run without a graph


def buckets(max_rows: int) -> list[int]:
    """Return the batch sizes to capture, as vLLM chooses them. The last one is max_rows, or MAX_ROWS if that is less.

    >>> buckets(20), buckets(1), buckets(300)[-4:]
    ([1, 2, 4, 8, 16, 20], [1], [256, 272, 288, 300])
    """
    last = min(max_rows, MAX_ROWS)
    return sorted({size for size in (1, 2, 4, *range(8, 256, 8), *range(256, last, 16)) if size < last} | {last})


class BucketedGraphs:
    """One graph per bucket, the largest captured first so that the others fit into its memory."""

    def __init__(self, step: Callable[[int], None], sizes: list[int], capture: Capture, progress: bool = True) -> None:
        """Capture `step(rows)` for each size. Each size runs once before its capture, to compile its kernels."""
        self._sizes, self._replays = sizes, dict[int, Launcher]()
        for rows in tqdm(sizes[::-1], desc="capturing CUDA graphs", leave=False, disable=None if progress else True):
            try:
                step(rows)
                self._replays[rows] = capture(partial(step, rows))
            except Exception as error:
                error.add_note(f"in the graph of {rows} rows")
                raise

    @property
    def max_rows(self) -> int:
        return self._sizes[-1]

    def run(self, num_rows: int) -> None:
        """Replay the graph of the smallest bucket that has room for `num_rows`."""
        self._replays[self._sizes[bisect.bisect_left(self._sizes, num_rows)]]()


class DecodeOutput(NamedTuple):
    """The results of a step, with one row per sequence of the batch."""

    hidden: Tensor  # [num_seqs, hidden_size]
    logits: Tensor  # [num_seqs, vocab_size]
    tokens: Tensor  # int64 [num_seqs], from sample_rows()
    sampled: Tensor  # float32 [num_seqs, 2], each a token id and its log-probability


class DecodeGraphs:
    """Decode steps as graphs, with all the memory that the graphs read and write."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        fused: FusedModel,
        linears: LinearDispatch,
        context: KernelContext,
        max_model_len: int,
        sizes: list[int],
        capture: Capture,
        progress: bool = True,
    ) -> None:
        """Capture the steps of `fused`, with the head of `model`. Raise any error from capturing."""
        self._fused, self._lm_head, self._linears, self._context = fused, model.lm_head, linears, context
        self.max_rows, angles, config = sizes[-1], context.cos, model.config
        block_size, device = context.pool.block_size, angles.device
        self.inputs = StepInputs(self.max_rows, -(-max_model_len // block_size), block_size, device)
        self._outputs = DecodeOutput(
            angles.new_empty(self.max_rows, config.hidden_size),
            angles.new_empty(self.max_rows, config.vocab_size),
            angles.new_empty(self.max_rows, dtype=torch.int64),
            angles.new_empty(self.max_rows, 2, dtype=torch.float32),
        )
        self._decode_workspaces = {rows: context.decode_workspace(rows) for rows in sizes}
        self._sampling_workspace = SamplingWorkspace(self.max_rows, config.vocab_size, device)
        self.inputs.fill([])  # all padding
        self._graphs = BucketedGraphs(self._step, sizes, capture, progress)

    def run(self, batch: list[Scheduled]) -> DecodeOutput:
        """Launch a step of at most max_rows sequences. The next step overwrites the returned tensors."""
        try:
            self.inputs.fill(batch)
            self._graphs.run(len(batch))
        except BaseException:
            self.inputs.forget()
            raise
        return DecodeOutput(*(tensor[: len(batch)] for tensor in self._outputs))

    def _step(self, rows: int) -> None:
        """Compute a step of `rows` rows, from inputs to sampled tokens. Graphs record this function."""
        inputs, outputs = self.inputs.device, DecodeOutput(*(tensor[:rows] for tensor in self._outputs))
        lens, *order = (inputs[name][:rows] for name in ("context_lens", "rows", "table_indices"))
        decodes = DecodeMetadata(self.inputs.block_tables(), lens, self._decode_workspaces[rows], *order)
        attend = KernelAttend(self._context, inputs["slot_mapping"][:rows], decodes, None)
        self._fused(inputs["input_ids"][:rows], inputs["positions"][:rows], attend, outputs.hidden)
        self._linears(self._lm_head, outputs.hidden, out=outputs.logits)
        params, workspace = sampling_params(inputs, rows), self._sampling_workspace
        self._context.ops.sample_rows(outputs.logits, params, workspace, outputs.tokens, outputs.sampled)
