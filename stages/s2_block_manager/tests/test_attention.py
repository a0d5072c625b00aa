"""`attend`: store this step's keys and values, and let each token see its own past and nothing else."""

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from ..attention import AttentionMetadata, GatherAttention, attend_one
from ..kv_cache import KVCache, bytes_per_token
from ..llama import LlamaForCausalLM, ModelConfig
from ..model_runner import ModelRunner
from ..sequence import Sequence
from .helpers import attend_without_cache, make_sequence

HEAD_DIM = 8
BLOCK_SIZE = 4
HEADS = {"every head has its own": (4, 4), "pairs share": (4, 2), "all share one": (4, 1), "one head": (1, 1)}


def model_config(num_kv_heads: int = 2, num_layers: int = 1) -> ModelConfig:
    return ModelConfig(320, 32, 48, num_layers, 4, num_kv_heads, HEAD_DIM)


def make_cache(num_blocks: int, *tables: list[int], num_layers: int = 1) -> KVCache:
    """A pool in which every slot that is read before it is written would be seen: 1e30 in these tables, NaN elsewhere.

    (A slot under a mask counts 0 times what is in it, and 0 times NaN is NaN.)
    """
    config = model_config(num_layers=num_layers)
    cache = KVCache(config, num_blocks, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    cache.blocks.fill_(float("nan"))
    cache.blocks[[block for table in tables for block in table]] = 1e30
    return cache


def random_qkv(num_tokens: int, num_heads: int = 4, num_kv_heads: int = 2, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (num_heads, num_kv_heads, num_kv_heads)
    return [torch.randn(num_tokens, n, HEAD_DIM, generator=generator) for n in heads]


def slot(table: list[int], position: int) -> int:
    return table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


def step(members: list[tuple[list[int], int, int]]) -> AttentionMetadata:
    """A step in which each sequence (block table, tokens computed before, tokens now) computes its next tokens."""
    query_start_loc: list[int] = [0]
    slots: list[int] = []
    for table, before, now in members:
        query_start_loc.append(query_start_loc[-1] + now)
        slots += [slot(table, position) for position in range(before, before + now)]
    return AttentionMetadata(
        query_start_loc=query_start_loc,
        context_lens=[before + now for _, before, now in members],
        block_tables=[torch.tensor(table) for table, _, _ in members],
        slot_mapping=torch.tensor(slots),
    )


# One sequence


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_prompt_sees_itself_up_to_each_token(heads, length):
    q, k, v = random_qkv(length, *heads)
    torch.testing.assert_close(attend_one(q, k, v), attend_without_cache(0, q, k, v))


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("length", [1, 2, 7])
def test_the_newest_token_sees_everything(heads, length):
    q, k, v = random_qkv(length, *heads)
    torch.testing.assert_close(attend_one(q[-1:], k, v), attend_without_cache(0, q, k, v)[-1:])


def test_a_part_of_a_prompt_is_refused():
    q, k, v = random_qkv(5)
    with pytest.raises(AssertionError, match="3 queries on 5 keys"):
        attend_one(q[2:], k, v)


# A batch on the pool


def test_token_by_token_equals_all_at_once():
    q, k, v = random_qkv(6)
    attention = GatherAttention(make_cache(5, [3, 0]))
    rows = []
    for i in range(6):
        attend = attention.plan(step([([3, 0], i, 1)]))
        rows.append(attend(0, q[i : i + 1], k[i : i + 1], v[i : i + 1]))
    torch.testing.assert_close(torch.cat(rows), attend_without_cache(0, q, k, v))


def test_sequences_in_one_step_do_not_see_each_other():
    """A prompt of 4, the newest token after 5, and a prompt of 1, in blocks that lie in another order in the pool."""
    attention = GatherAttention(make_cache(6, [2], [5, 1], [0]))
    a, b, c = (random_qkv(n, seed=n) for n in (4, 6, 1))
    attend = attention.plan(step([([5, 1], 0, 5)]))
    attend(0, *(x[:5] for x in b))
    attend = attention.plan(step([([2], 0, 4), ([5, 1], 5, 1), ([0], 0, 1)]))
    out = attend(0, *(torch.cat((x, y[5:], z)) for x, y, z in zip(a, b, c, strict=True)))
    alone = torch.cat((attend_without_cache(0, *a), attend_without_cache(0, *b)[5:], attend_without_cache(0, *c)))
    torch.testing.assert_close(out, alone)


def test_layers_do_not_see_each_other():
    attention = GatherAttention(make_cache(3, [2, 0], num_layers=2))
    layers = [random_qkv(6, seed=1), random_qkv(6, seed=2)]
    attend = attention.plan(step([([2, 0], 0, 5)]))
    for layer, qkv in enumerate(layers):
        attend(layer, *(x[:5] for x in qkv))
    attend = attention.plan(step([([2, 0], 5, 1)]))
    for layer, qkv in enumerate(layers):
        out = attend(layer, *(x[5:] for x in qkv))
        torch.testing.assert_close(out, attend_without_cache(layer, *qkv)[5:])


def test_where_the_blocks_lie_does_not_matter():
    q, k, v = random_qkv(10)
    for table in permutations(range(4), 3):
        attention = GatherAttention(make_cache(4, list(table)))
        attend = attention.plan(step([(list(table), 0, 9)]))
        prompt = attend(0, q[:9], k[:9], v[:9])
        attend = attention.plan(step([(list(table), 9, 1)]))
        newest = attend(0, q[9:], k[9:], v[9:])
        torch.testing.assert_close(torch.cat((prompt, newest)), attend_without_cache(0, q, k, v))


def test_a_step_writes_its_own_slots_and_no_others():
    """5 tokens fill block 2 and the first slot of block 0; another sequence has one in block 3."""
    cache = make_cache(4, num_layers=2)
    attention = GatherAttention(cache)
    q, k, v = random_qkv(6)
    attend = attention.plan(step([([2, 0], 0, 5), ([3], 0, 1)]))
    attend(1, q, k, v)
    blocks, offsets = [2, 2, 2, 2, 0, 3], [0, 1, 2, 3, 0, 0]
    assert torch.equal(cache.blocks[blocks, 1, 0, offsets], k) and torch.equal(cache.blocks[blocks, 1, 1, offsets], v)
    cache.blocks[blocks, 1, :, offsets] = float("nan")
    assert cache.blocks.isnan().all(), "something else was written"


def test_what_an_earlier_holder_left_in_the_slots_is_not_seen():
    attention = GatherAttention(make_cache(3))
    attend = attention.plan(step([([0, 1, 2], 0, 12)]))
    attend(0, *(1e30 * x for x in random_qkv(12)))
    qkv = random_qkv(6, seed=3)
    attend = attention.plan(step([([2, 0], 0, 6)]))
    torch.testing.assert_close(attend(0, *qkv), attend_without_cache(0, *qkv))


def test_blocks_that_no_table_of_the_step_names_are_not_seen():
    """NaN in all of them, between two steps; a member that has left was the last to write there."""
    cache = make_cache(5, [4, 1], [3])
    attention = GatherAttention(cache)
    stays, leaves = random_qkv(6, seed=1), random_qkv(3, seed=2)
    attend = attention.plan(step([([4, 1], 0, 5), ([3], 0, 3)]))
    attend(0, *(torch.cat((x[:5], y)) for x, y in zip(stays, leaves, strict=True)))
    cache.blocks[[0, 2, 3]] = float("nan")
    attend = attention.plan(step([([4, 1], 5, 1)]))
    torch.testing.assert_close(attend(0, *(x[5:] for x in stays)), attend_without_cache(0, *stays)[5:])


def test_a_batch_that_is_not_the_one_announced_is_refused():
    attend = GatherAttention(make_cache(2)).plan(step([([0], 0, 3)]))
    with pytest.raises(AssertionError, match="2 queries, the step has 3"):
        attend(0, *random_qkv(2))


def test_a_plan_for_the_next_step_leaves_this_ones_as_it_was():
    """An attend knows its own step: there is no step that the backend is in."""
    attention = GatherAttention(make_cache(4, [3], [0, 2]))
    a, b = random_qkv(3, seed=1), random_qkv(5, seed=2)
    first, second = attention.plan(step([([3], 0, 3)])), attention.plan(step([([0, 2], 0, 5)]))
    torch.testing.assert_close(second(0, *b), attend_without_cache(0, *b))
    torch.testing.assert_close(first(0, *a), attend_without_cache(0, *a))


# The pool's tensor


def test_a_slot_holds_a_key_and_a_value_for_each_kv_head_of_each_layer():
    cache = make_cache(5, num_layers=3)
    num_bytes = cache.blocks.numel() * cache.blocks.itemsize
    assert bytes_per_token(model_config(num_layers=3), torch.float32) == 2 * 3 * 2 * 8 * 4 == num_bytes // (5 * 4)
    assert bytes_per_token(model_config(num_layers=3), torch.bfloat16) == 2 * 3 * 2 * 8 * 2


def test_a_block_lies_in_memory_as_one_piece():
    cache = make_cache(5, num_layers=3)
    assert cache.blocks.shape == (5, 3, 2, 4, 2, HEAD_DIM) and cache.blocks[3].is_contiguous()


def test_rows_are_of_the_keys_and_then_of_the_values():
    """A block of 2 layers has 16 rows: 4 keys and 4 values of layer 0, then of layer 1. Slot 6 is block 1, offset 2."""
    cache = make_cache(3, num_layers=2)
    assert cache.rows(torch.tensor([0, 3, 6])).tolist() == [0, 3, 18, 4, 7, 22]
    assert make_cache(3).rows(torch.tensor([6, 8])).tolist() == [10, 16, 14, 20]


def test_pieces_are_of_the_keys_and_then_of_the_values():
    """A block of 2 layers has 4 pieces: the keys and the values of layer 0, then of layer 1."""
    assert make_cache(3, num_layers=2).pieces(torch.tensor([2, 0])).tolist() == [8, 0, 9, 1]
    assert make_cache(3).pieces(torch.tensor([0, 2, 1])).tolist() == [0, 4, 2, 1, 5, 3]


def test_what_is_written_is_read_in_the_order_of_the_table():
    """10 tokens in blocks 5, 0 and 3, in both layers; the slots behind them and the other blocks stay as they were."""
    table = [5, 0, 3]
    cache = make_cache(6, table, num_layers=2)
    rows = cache.rows(torch.tensor([slot(table, position) for position in range(10)]))
    written = [random_qkv(10, seed=layer)[1:] for layer in (0, 1)]
    for layer, (k, v) in enumerate(written):
        cache.write(layer, rows, k, v)
    for layer, (k, v) in enumerate(written):
        for length in (1, 4, 5, 10):
            keys, values = cache.read(layer, cache.pieces(torch.tensor(table)), length)
            assert torch.equal(keys, k[:length]) and torch.equal(values, v[:length])
    assert (cache.blocks[3, :, :, 2:] == 1e30).all()
    assert cache.blocks[[1, 2, 4]].isnan().all()


def test_tokens_may_be_written_in_any_order_and_to_many_blocks_at_once():
    cache = make_cache(4)
    _, k, v = random_qkv(4)
    cache.write(0, cache.rows(torch.tensor([13, 2, 7, 12])), k, v)  # block 3 offset 1, 0 and 2, 1 and 3, 3 and 0
    assert torch.equal(cache.blocks[[3, 0, 1, 3], 0, 0, [1, 2, 3, 0]], k)
    assert torch.equal(cache.blocks[[3, 0, 1, 3], 0, 1, [1, 2, 3, 0]], v)


def test_reading_copies():
    cache = make_cache(3, [2, 1])
    keys, values = cache.read(0, cache.pieces(torch.tensor([2, 1])), 6)
    assert keys.shape == values.shape == (6, 2, HEAD_DIM)
    cache.blocks.zero_()
    assert (keys == 1e30).all() and (values == 1e30).all()


def test_a_pool_that_memory_cannot_hold_is_refused_in_blocks_and_bytes():
    with pytest.raises(ValueError, match=r"cpu has no room for a pool of 1,000,000,000,000,000 blocks, 512,0"):
        KVCache(model_config(), 10**15, BLOCK_SIZE, torch.float32, torch.device("cpu"))


# Where the runner puts a token


class Recorded(GatherAttention):
    """Notes the steps that are announced, and answers with zeros."""

    def __init__(self) -> None:
        self.steps: list[AttentionMetadata] = []

    def plan(self, step: AttentionMetadata) -> Any:
        self.steps.append(step)
        return lambda layer, q, k, v: torch.zeros_like(q)


def sequence_in(table: list[int], num_tokens: int, num_computed_tokens: int = 0) -> Sequence:
    seq = make_sequence(str(table), num_tokens, max_tokens=9)
    seq.block_table, seq.num_computed_tokens = table, num_computed_tokens
    return seq


def announced(model: LlamaForCausalLM, *batch: tuple[Sequence, int]) -> AttentionMetadata:
    attention = Recorded()
    ModelRunner(model, attention, BLOCK_SIZE, torch.device("cpu")).run(list(batch))
    return attention.steps[0]


def test_a_token_goes_where_the_block_table_says(model):
    """Block 3 is slots 12 to 15, block 0 slots 0 to 3, block 1 slots 4 to 7."""
    a, b = sequence_in([3, 0], 6), sequence_in([1], 3)
    step = announced(model, (a, 6), (b, 3))
    assert step.slot_mapping.tolist() == [12, 13, 14, 15, 0, 1] + [4, 5, 6]
    assert [table.tolist() for table in step.block_tables] == [[3, 0], [1]]
    assert (step.query_start_loc, step.context_lens) == ([0, 6, 9], [6, 3])


def test_later_tokens_go_behind_those_that_are_there(model):
    """Token 8 begins a block, token 7 ends one, and of the third sequence tokens 3 and 4 come in one step."""
    batch = [(sequence_in([2, 7, 5], 9, 8), 1), (sequence_in([1, 4], 8, 7), 1), (sequence_in([6, 3], 5, 3), 2)]
    step = announced(model, *batch)
    assert step.slot_mapping.tolist() == [20, 19, 27, 12]
    assert (step.query_start_loc, step.context_lens) == ([0, 1, 2, 4], [9, 8, 5])
