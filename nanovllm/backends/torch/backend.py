"""The interface that computes a ModelRunner's steps, and its plain version. cpu/ and gpu/ implement it with kernels."""

from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...engine.executor import Scheduled
from ...engine.sequence import Sequence
from ...llama import LlamaForCausalLM
from ...progress import note_progress
from ...requests.tokens import SampledToken, SamplingRow
from .attention import AttentionMetadata, PagedAttention, compute_slot_mapping
from .sampler import sample


class Computed(NamedTuple):
    """The result of a step. Item i owns rows query_start_loc[i] .. query_start_loc[i + 1] - 1 of `hidden`."""

    hidden: Tensor  # [num_tokens, hidden_size]
    query_start_loc: list[int]  # [batch size + 1]
    logits: Tensor | None = None  # [batch size, vocab_size], if they were computed too


class SamplerAhead(Protocol):
    """A sampler whose tokens the device can use before the host has read them."""

    def start_sampling(self, logits: Tensor, seqs: list[Sequence]) -> Callable[[], list[SampledToken]] | None:
        """Start to sample a token for each row of `logits` [len(seqs), vocab_size]. Return a function that reads them.

        In the next step, the placeholder_id ~i stands for the token of row i. Return None if the host must help.
        """
        ...


class Backend(Protocol):
    """The parts of a step. Replace ModelRunner.backend only while no request is running."""

    @property
    def ahead(self) -> SamplerAhead | None:
        """The part that samples without the host, or None if steps run on the host."""

    def compute(self, batch: list[Scheduled]) -> Computed:
        """Compute the next tokens of each sequence."""
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
            note_progress()  # in each layer: a step of many tokens takes long
            return attend(*args)

        hidden: Tensor = self._model(input_ids, positions, attend_and_report)  # [num_tokens, hidden_size]
        return Computed(hidden, step.query_start_loc)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._model.compute_logits(hidden)

    def sampling(self, computed: Computed) -> AbstractContextManager[None]:
        return nullcontext()

    def sample(self, logits: Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
        return sample(logits, rows)


def ends_of(batch: list[Scheduled]) -> list[int]:
    """Return the position at which each item ends: where its sequence continues in the next item or the next step."""
    ends: list[int] = []
    for i, (seq, num_tokens) in enumerate(batch):
        start = ends[-1] if i > 0 and batch[i - 1][0] is seq else seq.num_launched_tokens
        ends.append(start + num_tokens)
    return ends


def flatten(batch: list[Scheduled], block_size: int, device: torch.device) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """Return the next tokens of all sequences as flat tensors.

    They are input_ids and positions, int64 [num_tokens], and the step's metadata for attention. An item that continues
    the one before counts as another sequence with the same blocks.
    """
    context_lens = ends_of(batch)
    token_ids, rows, tables, new_blocks = list[int](), list[int](), list[list[int]](), list[int]()
    for end, (seq, num_tokens) in zip(context_lens, batch, strict=True):
        start = end - num_tokens
        token_ids += seq.input_ids(num_tokens, start)
        rows += range(start, end)
        tables.append(seq.block_table[: -(-end // block_size)])
        new_blocks += tables[-1][-(-start // block_size) :]
    input_ids, positions = tensor_of(token_ids, device), tensor_of(rows, device)  # [num_tokens] each
    block_tables = pad_tables(tables).to(device)
    seqs = tensor_of([i for i, (_, num_tokens) in enumerate(batch) for _ in range(num_tokens)], device)  # [num_tokens]
    step = AttentionMetadata(
        query_start_loc=[0, *accumulate(num_tokens for _, num_tokens in batch)],
        context_lens=context_lens,
        block_tables=block_tables,
        slot_mapping=compute_slot_mapping(block_tables, seqs, positions, block_size),
        new_blocks=tensor_of(new_blocks, device),
    )
    return input_ids, positions, step


def pad_tables(tables: list[list[int]]) -> Tensor:
    """Return the tables as int64 [num_seqs, max_blocks], each padded with its own last block.

    They go through one flat array, because torch converts a list of lists number by number.
    """
    width, flat = max(len(table) for table in tables), array("q")
    for table in tables:
        flat += array("q", table + table[-1:] * (width - len(table)))
    return torch.frombuffer(flat, dtype=torch.int64).view(-1, width)


def tensor_of(values: list[int], device: torch.device) -> Tensor:
    """Return int64 numbers on a device."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.int64, device=device)
    pinned = torch.tensor(values, dtype=torch.int64, pin_memory=True)
    return pinned.to(device, non_blocking=True)  # a copy from pageable memory would wait for the GPU
