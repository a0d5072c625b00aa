"""Backend, the interface that computes the steps of a ModelRunner, and TorchBackend, its version in plain PyTorch."""

from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...engine.executor import Scheduled
from ...engine.sequence import Sequence
from ...llama import LlamaForCausalLM
from ...progress import note_progress
from ...requests.tokens import SamplingRow, StepOutput
from .attention import AttentionMetadata, PagedAttention
from .sampler import sample

Numbers = NDArray[np.int64]


class Computed(NamedTuple):
    """The result of a step. Batch item i owns rows query_start_loc[i] .. query_start_loc[i + 1] - 1 of `hidden`."""

    hidden: Tensor  # [num_tokens, hidden_size]
    query_start_loc: list[int]  # [batch size + 1]
    logits: Tensor | None = None  # [batch size, vocab_size], or None if not computed yet


class SamplerAhead(Protocol):
    """A sampler whose tokens the device can use before the host reads them."""

    def start_sampling(self, logits: Tensor, seqs: list[Sequence]) -> Callable[[], StepOutput] | None:
        """Start sampling a token for each row of `logits` [len(seqs), vocab_size]. Return a function that reads them.

        In the next step, the placeholder_id ~i stands for the token of row i. Return None if sampling needs the host.
        """
        ...


class Backend(Protocol):
    """The operations of a step. Replace ModelRunner.backend only while no request is running."""

    @property
    def ahead(self) -> SamplerAhead | None:
        """The sampler that does not need the host, or None if the backend has none."""

    def compute(self, batch: list[Scheduled]) -> Computed:
        """Run the model on the tokens that are scheduled for each sequence."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [num_rows, vocab_size] of `hidden` [num_rows, hidden_size]."""
        ...

    def sampling(self, computed: Computed) -> AbstractContextManager[None]:
        """Return a context manager for all work after the model, which may set the thread count or the device."""
        ...

    def sample(self, logits: Tensor, rows: list[SamplingRow]) -> StepOutput:
        """Sample one token for each row of `logits` [num_rows, vocab_size], as sampler.sample() does."""
        ...


class TorchBackend:
    """A Backend of plain PyTorch operations, for any device."""

    ahead: SamplerAhead | None = None

    def __init__(
        self, model: LlamaForCausalLM, attention: PagedAttention, block_size: int, device: torch.device
    ) -> None:
        self._model, self._attention = model, attention
        self._block_size, self._device = block_size, device

    def compute(self, batch: list[Scheduled]) -> Computed:
        input_ids, positions, step = flatten(batch, self._block_size, self._device)
        attend = self._attention.plan(step)

        def attend_and_report(*args: Any) -> Tensor:
            note_progress()  # in each layer, because a step with many tokens takes a while
            return attend(*args)

        hidden: Tensor = self._model(input_ids, positions, attend_and_report)  # [num_tokens, hidden_size]
        return Computed(hidden, step.query_start_loc)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._model.compute_logits(hidden)

    def sampling(self, computed: Computed) -> AbstractContextManager[None]:
        return nullcontext()

    def sample(self, logits: Tensor, rows: list[SamplingRow]) -> StepOutput:
        return sample(logits, rows)


def end_positions(batch: list[Scheduled]) -> list[int]:
    """Return each item's end position, at which the next item or the next step continues the sequence."""
    if not any([seq.draft_token_ids for seq, _ in batch]):  # then each sequence has one item
        return [seq.num_computed_tokens + seq.num_in_flight_tokens + num_tokens for seq, num_tokens in batch]
    ends: list[int] = []
    for i, (seq, num_tokens) in enumerate(batch):
        start = ends[-1] if i > 0 and batch[i - 1][0] is seq else seq.num_launched_tokens
        ends.append(start + num_tokens)
    return ends


def flatten(batch: list[Scheduled], block_size: int, device: torch.device) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """Return the scheduled tokens of all sequences as flat tensors.

    These are input_ids and positions, int64 [num_tokens], and the step's metadata for attention. An item that continues
    the sequence of the item before it counts as a separate sequence with the same blocks.
    """
    context_lens, token_ids = end_positions(batch), list[int]()
    for end, (seq, num_tokens) in zip(context_lens, batch, strict=True):
        if num_tokens == 1:
            token_ids.append(seq.input_id(end - 1))
        else:
            token_ids += seq.input_ids(num_tokens, end - num_tokens)
    ends, counts = np.array(context_lens), np.array([num_tokens for _, num_tokens in batch])
    tables = pad_tables([seq.block_table for seq, _ in batch], -(-ends // block_size))
    firsts = counts.cumsum() - counts  # the index of each item's first token
    items = np.repeat(np.arange(len(batch)), counts)  # of each token
    positions = np.arange(len(token_ids)) + (ends - counts - firsts)[items]
    blocks, offsets = tables[items, positions // block_size], positions % block_size
    step = AttentionMetadata(
        query_start_loc=[*firsts.tolist(), len(token_ids)],
        context_lens=context_lens,
        block_tables=tensor_of(tables, device),
        slot_mapping=tensor_of(blocks * block_size + offsets, device),
        new_blocks=tensor_of(blocks[offsets == 0], device),
    )
    return tensor_of(token_ids, device), tensor_of(positions, device), step


def pad_tables(tables: list[list[int]], lengths: Numbers) -> Numbers:
    """Return the first lengths[i] blocks of table i as int64 [num_seqs, max_blocks], each row padded with its last one.

    The tables are joined in one flat array first, because numpy converts a list of lists one number at a time.
    """
    flat, sizes = array("q", list(chain.from_iterable(tables))), np.array([*map(len, tables)])
    columns = np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
    blocks: Numbers = np.frombuffer(flat, dtype=np.int64)[(sizes.cumsum() - sizes)[:, None] + columns]
    return blocks


def tensor_of(values: list[int] | Numbers, device: torch.device) -> Tensor:
    """Copy `values` to an int64 tensor on `device`, without waiting for a GPU."""
    tensor = torch.from_numpy(np.array(values, dtype=np.int64))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # a copy from pageable memory would wait for the GPU
