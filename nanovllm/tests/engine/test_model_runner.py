"""The runner turns sequences into one flat step, with metadata for attention."""

import random
from typing import Any

import pytest
import torch

from ...backends.torch.attention import AttentionMetadata, PagedAttention
from ...backends.torch.model_runner import ModelRunner
from ...engine.sequence import Sequence
from ...llama import LlamaForCausalLM
from ..testing.pools import BLOCK_SIZE
from ..testing.sequences import make_sequence


class RecordingAttention(PagedAttention):
    """An attention backend that records steps, and attends to nothing."""

    def __init__(self) -> None:
        self.steps: list[AttentionMetadata] = []

    def plan(self, step: AttentionMetadata) -> Any:
        self.steps.append(step)
        return lambda layer, q, k, v: torch.zeros_like(q)


def sequence_in(table: list[int], num_tokens: int, num_computed_tokens: int = 0) -> Sequence:
    seq = make_sequence(str(table), num_tokens, max_tokens=9)
    seq.block_table, seq.num_computed_tokens = table, num_computed_tokens
    return seq


def metadata_of(model: LlamaForCausalLM, *batch: tuple[Sequence, int]) -> AttentionMetadata:
    attention = RecordingAttention()
    ModelRunner(model, attention, BLOCK_SIZE, torch.device("cpu")).run(list(batch))
    return attention.steps[0]


def test_slots_follow_the_block_tables(model):
    """Block 3 has slots 12 to 15, block 0 slots 0 to 3, and block 1 slots 4 to 7."""
    a, b = sequence_in([3, 0], 6), sequence_in([1], 3)
    step = metadata_of(model, (a, 6), (b, 3))
    assert step.slot_mapping.tolist() == [12, 13, 14, 15, 0, 1] + [4, 5, 6]
    assert (step.query_start_loc, step.context_lens) == ([0, 6, 9], [6, 3])


def test_block_tables_are_padded_with_their_own_last_block(model):
    """So reads past the end of a sequence stay within its own memory."""
    batch = [(sequence_in([3, 0], 6), 6), (sequence_in([1], 3), 3), (sequence_in([7, 2, 5], 9, 8), 1)]
    tables = metadata_of(model, *batch).block_tables
    assert tables.dtype == torch.int64
    assert tables.tolist() == [[3, 0, 0], [1, 1, 1], [7, 2, 5]]


def test_block_tables_are_not_converted_from_nested_lists(model, monkeypatch):
    """PyTorch converts those number by number: with 256 sequences of 4,000 tokens that is most of a step."""
    tensor, nested = torch.tensor, []

    def watched(values, **options):
        nested.extend(value for value in values if isinstance(value, list))
        return tensor(values, **options)

    monkeypatch.setattr(torch, "tensor", watched)
    batch = [(sequence_in([3, 0], 6), 6), (sequence_in([1], 3), 3), (sequence_in([7, 2, 5], 9, 8), 1)]
    assert metadata_of(model, *batch).block_tables.shape == (3, 3)
    assert nested == []


def test_new_blocks_are_those_whose_first_slot_is_written(model):
    """Both blocks of a prompt, two of the three blocks of a later chunk, and the block that a decode starts."""
    prompt, chunk = (sequence_in([3, 0], 6), 6), (sequence_in([7, 2, 5, 9], 16, 2), 8)
    step = metadata_of(model, prompt, chunk, (sequence_in([8, 4], 5, 4), 1), (sequence_in([6, 1], 6, 5), 1))
    assert step.new_blocks.tolist() == [3, 0, 2, 5, 4]
    assert metadata_of(model, (sequence_in([6, 1], 6, 5), 1)).new_blocks.dtype == torch.int64


@pytest.mark.parametrize("seed", range(3))
def test_random_batches_have_the_slots_of_a_loop_over_tokens(model, seed):
    rng = random.Random(seed)
    blocks = rng.sample(range(100), 60)
    batch = []
    for _ in range(6):
        num_tokens = rng.randint(1, 40)
        computed = rng.randrange(num_tokens)
        table = [blocks.pop() for _ in range(-(-num_tokens // BLOCK_SIZE))]
        batch.append((sequence_in(table, num_tokens, computed), rng.randint(1, num_tokens - computed)))
    expected = [
        seq.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for seq, num_tokens in batch
        for position in range(seq.num_computed_tokens, seq.num_computed_tokens + num_tokens)
    ]
    assert metadata_of(model, *batch).slot_mapping.tolist() == expected
