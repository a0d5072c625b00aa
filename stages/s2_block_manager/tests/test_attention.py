"""Attention: store the keys and values of a step, and attend to what each token may see."""

from itertools import permutations

import pytest
import torch
from torch import Tensor

from ..attention import AttentionMetadata, GatherAttention, attend_one
from ..kv_cache import KVCache
from ..llama import LlamaForCausalLM, ModelConfig
from ..model_runner import ModelRunner
from .helpers import attend_without_cache, make_sequence

HEAD_DIM = 8
BLOCK_SIZE = 4
HEADS = {"every head has its own": (4, 4), "pairs share": (4, 2), "all share one": (4, 1), "one head": (1, 1)}


def model_config(num_kv_heads: int = 2, num_layers: int = 1) -> ModelConfig:
    return ModelConfig(320, 32, 48, num_layers, 4, num_kv_heads, HEAD_DIM)


def make_cache(num_blocks: int, num_layers: int = 1) -> KVCache:
    """Return a pool of NaN: a slot that is read before it is written would show."""
    config = model_config(num_layers=num_layers)
    cache = KVCache(config, num_blocks, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    cache.blocks.fill_(float("nan"))
    return cache


def random_qkv(num_tokens: int, num_heads: int = 4, num_kv_heads: int = 2, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (num_heads, num_kv_heads, num_kv_heads)
    return [torch.randn(num_tokens, n, HEAD_DIM, generator=generator) for n in heads]


def step(members: list[tuple[list[int], int, int]]) -> AttentionMetadata:
    """Return a step of sequences, each with its block table, tokens computed before and tokens of this step."""
    query_start_loc: list[int] = [0]
    slots: list[int] = []
    for table, before, now in members:
        query_start_loc.append(query_start_loc[-1] + now)
        slots += [table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(before, before + now)]
    return AttentionMetadata(
        query_start_loc=query_start_loc,
        context_lens=[before + now for _, before, now in members],
        block_tables=[torch.tensor(table) for table, _, _ in members],
        slot_mapping=torch.tensor(slots),
    )


def assert_attention(out: Tensor, expected: Tensor, who: str) -> None:
    """Raise AssertionError with the first token of a step whose attention is not the expected one."""
    wrong = (~out.isclose(expected, atol=1e-5, rtol=1e-4)).flatten(1).any(1).nonzero().flatten().tolist()
    if wrong:
        off = (out - expected)[wrong[0]].abs().max()
        raise AssertionError(f"{who}: token {wrong[0]} of the step attends to something else, it is off by {off:.2g}")


def assert_stored(cache: KVCache, layer: int, blocks: list[int], offsets: list[int], k: Tensor, v: Tensor) -> None:
    """Raise AssertionError with the first token whose key or value is not in its block, at its offset."""
    for i, (block, offset) in enumerate(zip(blocks, offsets, strict=True)):
        for kind, name, expected in ((0, "key", k[i]), (1, "value", v[i])):
            if not cache.blocks[block, layer, kind, offset].equal(expected):
                raise AssertionError(f"the {name} of token {i} is not in block {block}, offset {offset}, layer {layer}")


# One sequence


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("length", [1, 2, 7])
def test_prompt_and_newest_token_attend_to_their_past(heads, length):
    q, k, v = random_qkv(length, *heads)
    expected = attend_without_cache(0, q, k, v)
    torch.testing.assert_close(attend_one(q, k, v), expected)
    torch.testing.assert_close(attend_one(q[-1:], k, v), expected[-1:])


def test_part_of_a_prompt_is_an_error():
    q, k, v = random_qkv(5)
    with pytest.raises(AssertionError, match="3 queries on 5 keys"):
        attend_one(q[2:], k, v)


# A batch


def test_blocks_may_lie_anywhere():
    """A prompt of 9 tokens, and then one more."""
    q, k, v = random_qkv(10)
    for table in map(list, permutations(range(4), 3)):
        attention = GatherAttention(make_cache(4))
        prompt = attention.plan(step([(table, 0, 9)]))(0, q[:9], k[:9], v[:9])
        newest = attention.plan(step([(table, 9, 1)]))(0, q[9:], k[9:], v[9:])
        expected = attend_without_cache(0, q, k, v)
        assert_attention(prompt, expected[:9], f"a prompt of 9 tokens in blocks {table}")
        assert_attention(newest, expected[9:], f"the token after a prompt of 9, in blocks {table}")


def test_sequences_of_a_step_do_not_see_each_other():
    """A prompt of 4 tokens, the newest token after 5, and a prompt of 1."""
    attention = GatherAttention(make_cache(6))
    a, b, c = (random_qkv(n, seed=n) for n in (4, 6, 1))
    attention.plan(step([([5, 1], 0, 5)]))(0, *(x[:5] for x in b))
    attend = attention.plan(step([([2], 0, 4), ([5, 1], 5, 1), ([0], 0, 1)]))
    out = attend(0, *(torch.cat((x, y[5:], z)) for x, y, z in zip(a, b, c, strict=True)))
    alone = torch.cat((attend_without_cache(0, *a), attend_without_cache(0, *b)[5:], attend_without_cache(0, *c)))
    torch.testing.assert_close(out, alone)


def test_layers_do_not_see_each_other():
    attention = GatherAttention(make_cache(3, num_layers=2))
    layers = [random_qkv(6, seed=1), random_qkv(6, seed=2)]
    attend = attention.plan(step([([2, 0], 0, 5)]))
    for layer, qkv in enumerate(layers):
        attend(layer, *(x[:5] for x in qkv))
    attend = attention.plan(step([([2, 0], 5, 1)]))
    for layer, qkv in enumerate(layers):
        out = attend(layer, *(x[5:] for x in qkv))
        torch.testing.assert_close(out, attend_without_cache(layer, *qkv)[5:])


def test_step_writes_its_own_slots_only():
    """5 tokens fill block 2 and the first slot of block 0; another sequence has one token in block 3."""
    cache = make_cache(4, num_layers=2)
    q, k, v = random_qkv(6)
    GatherAttention(cache).plan(step([([2, 0], 0, 5), ([3], 0, 1)]))(1, q, k, v)
    blocks, offsets = [2, 2, 2, 2, 0, 3], [0, 1, 2, 3, 0, 0]
    assert_stored(cache, 1, blocks, offsets, k, v)
    cache.blocks[blocks, 1, :, offsets] = float("nan")
    assert cache.blocks.isnan().all(), "a step in layer 1 wrote to a slot or a layer that is not its own"


def test_keys_of_an_earlier_holder_are_not_seen():
    attention = GatherAttention(make_cache(3))
    attention.plan(step([([0, 1, 2], 0, 12)]))(0, *(1e30 * x for x in random_qkv(12)))
    qkv = random_qkv(6, seed=3)
    attend = attention.plan(step([([2, 0], 0, 6)]))
    torch.testing.assert_close(attend(0, *qkv), attend_without_cache(0, *qkv))


# The pool's tensor


def test_block_is_one_piece_of_memory():
    cache = make_cache(5, num_layers=3)
    assert cache.blocks.shape == (5, 3, 2, BLOCK_SIZE, 2, HEAD_DIM) and cache.blocks[3].is_contiguous()
    assert cache.bytes_per_token == 2 * 3 * 2 * HEAD_DIM * 4


def test_slot_is_block_times_block_size_plus_offset():
    cache = make_cache(4)
    _, k, v = random_qkv(4)
    cache.write(0, torch.tensor([13, 2, 7, 12]), k, v)
    assert_stored(cache, 0, blocks=[3, 0, 1, 3], offsets=[1, 2, 3, 0], k=k, v=v)


def test_slots_are_read_in_the_order_of_the_table():
    cache = make_cache(6, num_layers=2)
    _, k, v = random_qkv(10)
    cache.write(1, step([([5, 0, 3], 0, 10)]).slot_mapping, k, v)
    for length in (1, 4, 5, 10):
        keys, values = cache.read(1, torch.tensor([5, 0, 3]), length)
        read = f"read() of blocks 5, 0, 3 and length {length}"
        assert keys.shape == k[:length].shape, f"{read} returns {len(keys)} keys"
        for i in range(length):
            for name, result, expected in (("key", keys, k), ("value", values, v)):
                if not result[i].equal(expected[i]):
                    raise AssertionError(f"{read}: {name} {i} is not that of token {i}")
    cache.blocks.zero_()
    if not keys.equal(k):
        raise AssertionError("read() returns a copy: clearing the pool afterwards must not change it")


# The metadata of a step


class Recorder(GatherAttention):
    """A backend that keeps the metadata of the last step. Its attention is zeros."""

    def plan(self, step: AttentionMetadata):
        self.step = step
        return lambda layer, q, k, v: torch.zeros_like(q)


def metadata(model: LlamaForCausalLM, *batch: tuple[list[int], int, int]) -> AttentionMetadata:
    """Run sequences, each with its block table, tokens computed before and tokens of this step."""
    attention, scheduled = Recorder(make_cache(1)), []
    for table, before, now in batch:
        seq = make_sequence(str(table), before + now, max_tokens=9)
        seq.block_table, seq.num_computed_tokens = table, before
        scheduled.append((seq, now))
    ModelRunner(model, attention, BLOCK_SIZE, torch.device("cpu")).run(scheduled)
    return attention.step


def test_tokens_go_where_the_block_table_says(model):
    """Block 3 is slots 12 to 15, block 0 slots 0 to 3. Token 8 begins a block, token 7 ends one."""
    step = metadata(model, ([3, 0], 0, 6), ([1], 0, 3), ([2, 7, 5], 8, 1), ([1, 4], 7, 1))
    prompt, short, decode, last = step.slot_mapping.split([6, 3, 1, 1])
    assert prompt.tolist() == [12, 13, 14, 15, 0, 1], "the slots of tokens 0 to 5 of a sequence in blocks 3 and 0"
    assert short.tolist() == [4, 5, 6], "the slots of tokens 0 to 2 of a sequence in block 1"
    assert decode.tolist() == [20], "the slot of token 8 of a sequence in blocks 2, 7 and 5"
    assert last.tolist() == [19], "the slot of token 7 of a sequence in blocks 1 and 4"
    assert [table.tolist() for table in step.block_tables] == [[3, 0], [1], [2, 7, 5], [1, 4]]
    assert (step.query_start_loc, step.context_lens) == ([0, 6, 9, 10, 11], [6, 3, 9, 8])
