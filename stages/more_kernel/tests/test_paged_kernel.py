"""The kernel, function by function, and the backend that calls it. Nothing is compiled here: see test_compiled.py."""

import random
from collections.abc import Iterator
from itertools import accumulate, chain
from math import log

import pytest
import torch
from torch import Tensor

from .. import kernel_attention, paged_kernel
from ..attention import AttentionMetadata
from ..kernel_attention import KernelAttention, contexts
from ..kv_cache import KVCache
from ..llama import ModelConfig
from .helpers import attend_without_cache
from .uncompiled import uncompiled

HEAD_DIM, BLOCK_SIZE = 8, 4
GROUP, NUM_KV_HEADS, NUM_KEYS = 3, 2, 9  # of the tests of one block


@pytest.fixture(autouse=True)
def as_python() -> Iterator[None]:
    with uncompiled(paged_kernel):
        yield


def assert_close(name: str, actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Raise AssertionError with the largest difference."""
    if not actual.isfinite().all():
        raise AssertionError(f"{name}: not finite, there is {actual[~actual.isfinite()][0]}")
    if not torch.isclose(actual, expected, tolerance, tolerance).all():
        raise AssertionError(f"{name}: off by {(actual - expected).abs().max():.2g}")


# ---- each token's context


def contexts_of(*sizes: tuple[int, int]) -> tuple[list[int], list[int]]:
    """Return what contexts() has for sequences, each with the tokens before this step and those of this step."""
    starts, nothing = [0, *accumulate(now for _, now in sizes)], torch.empty(0)
    step = AttentionMetadata(starts, [before + now for before, now in sizes], nothing, nothing, nothing)
    seqs, context_lens = contexts(step)
    assert (seqs.dtype, context_lens.dtype) == (torch.int64, torch.int64)
    return seqs.tolist(), context_lens.tolist()


def test_a_decoded_token_sees_its_whole_sequence():
    """Three sequences decode, with 6, 0 and 99 tokens before this one."""
    assert contexts_of((6, 1), (0, 1), (99, 1)) == ([0, 1, 2], [7, 1, 100])


def test_each_token_of_a_prompt_sees_one_more():
    """A prompt of 4 tokens is computed in one step."""
    assert contexts_of((0, 4)) == ([0, 0, 0, 0], [1, 2, 3, 4])


def test_a_chunk_sees_the_tokens_before_it():
    """A chunk of 3 tokens follows 10 others."""
    assert contexts_of((10, 3)) == ([0, 0, 0], [11, 12, 13])


def test_tokens_of_a_step_are_numbered_by_sequence():
    """A decode, a prompt of 2, and 3 tokens after 5 others."""
    assert contexts_of((3, 1), (0, 2), (5, 3)) == ([0, 1, 1, 2, 2, 2], [4, 1, 2, 6, 7, 8])


# ---- one block


def random_block(num_keys: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return keys and values [num_keys, NUM_KV_HEADS, HEAD_DIM]."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(num_keys, NUM_KV_HEADS, HEAD_DIM, generator=generator) for _ in range(2))
    return keys, values


def random_query() -> Tensor:
    return torch.randn(GROUP, HEAD_DIM, generator=torch.Generator().manual_seed(9))


def scores_of(query: Tensor, keys: Tensor, kv_head: int, num_keys: int) -> Tensor:
    """Return what score_block() computes for the first keys of a block, [GROUP, num_keys]."""
    scores = torch.full((GROUP, num_keys), float("nan"))
    paged_kernel.score_block(query.numpy(), keys.numpy(), kv_head, scores.numpy())
    if scores.isnan().any() and keys.isfinite().all():  # the NaN is that of torch.full
        raise AssertionError("scores holds NaN: set every number of the array that you are given, with =")
    return scores


def test_scores_are_scaled_products_of_queries_and_keys():
    query, (keys, _) = random_query(), random_block(BLOCK_SIZE)
    expected = query @ keys[:, 0].T * HEAD_DIM**-0.5
    assert_close("scores [group, num_keys]", scores_of(query, keys, 0, BLOCK_SIZE), expected)


def test_each_kv_head_has_keys_of_its_own():
    query, (keys, _) = random_query(), random_block(BLOCK_SIZE)
    expected = query @ keys[:, 1].T * HEAD_DIM**-0.5
    assert_close("scores of KV head 1", scores_of(query, keys, 1, BLOCK_SIZE), expected)


def test_keys_past_the_context_are_not_read():
    """The block has 4 slots, and the array of scores has room for 3."""
    query, (keys, _) = random_query(), random_block(BLOCK_SIZE)
    keys[3] = float("nan")
    assert_close("scores of 3 keys", scores_of(query, keys, 0, 3), query @ keys[:3, 0].T * HEAD_DIM**-0.5)


class RunningSoftmax:
    """The arrays that add_block() updates, before the first block."""

    def __init__(self) -> None:
        self.sums, self.totals = torch.zeros(GROUP, HEAD_DIM), torch.zeros(GROUP)
        self.highest = torch.full((GROUP,), float("-inf"))

    def add(self, scores: Tensor, values: Tensor, kv_head: int = 0) -> None:
        """Add a block: scores [GROUP, num_keys], values [block_size, NUM_KV_HEADS, HEAD_DIM]."""
        arrays = (each.numpy() for each in (self.sums, self.totals, self.highest))
        paged_kernel.add_block(scores.numpy(), values.numpy(), kv_head, *arrays)

    def check(self, scores: Tensor, values: Tensor) -> None:
        """Compare with softmax over all keys: scores [GROUP, num_keys], values [num_keys, HEAD_DIM]."""
        assert_close("the highest scores", self.highest, scores.amax(1))
        weights = (scores - scores.amax(1, keepdim=True)).exp()
        assert_close("the totals", self.totals, weights.sum(1))
        assert_close("attention, sums / totals", self.sums / self.totals[:, None], scores.softmax(1) @ values)


def random_scores(num_keys: int) -> Tensor:
    return 3 * torch.randn(GROUP, num_keys, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("kv_head", range(NUM_KV_HEADS))
def test_one_block_is_softmax_over_its_keys(kv_head):
    softmax, scores, (_, values) = RunningSoftmax(), random_scores(BLOCK_SIZE), random_block(BLOCK_SIZE)
    softmax.add(scores, values, kv_head)
    softmax.check(scores, values[:, kv_head])


def scores_and_values(*keys: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Return a block of keys, each with a score for all heads, and a value whose numbers are all the same."""
    scores = torch.tensor([[score for score, _ in keys]] * GROUP)
    values = torch.tensor([value for _, value in keys]).reshape(-1, 1, 1).expand(-1, NUM_KV_HEADS, HEAD_DIM)
    return scores, values.contiguous()


def test_a_higher_score_shrinks_what_was_added_before():
    """A key of score 0 and value 1, and then one of score log(3) and value 5. The second counts three times: 16 / 4."""
    softmax = RunningSoftmax()
    softmax.add(*scores_and_values((0.0, 1.0)))
    softmax.add(*scores_and_values((log(3), 5.0)))
    assert_close("the highest scores", softmax.highest, torch.full((GROUP,), log(3)))
    assert_close("the totals, 1/3 + 1", softmax.totals, torch.full((GROUP,), 4 / 3))
    assert_close("the sums, 1/3 x 1 + 1 x 5", softmax.sums, torch.full((GROUP, HEAD_DIM), 16 / 3))


def test_a_lower_score_leaves_what_was_added_before():
    softmax = RunningSoftmax()
    softmax.add(*scores_and_values((log(3), 5.0)))
    softmax.add(*scores_and_values((0.0, 1.0)))
    assert_close("the highest scores", softmax.highest, torch.full((GROUP,), log(3)))
    assert_close("the totals, 1 + 1/3", softmax.totals, torch.full((GROUP,), 4 / 3))
    assert_close("the sums, 1 x 5 + 1/3 x 1", softmax.sums, torch.full((GROUP, HEAD_DIM), 16 / 3))


@pytest.mark.parametrize("seed", range(3))
def test_blocks_in_any_order_are_softmax_over_all_keys(seed):
    softmax, scores, (_, values) = RunningSoftmax(), random_scores(NUM_KEYS), random_block(NUM_KEYS)
    starts = list(range(0, NUM_KEYS, BLOCK_SIZE))
    random.Random(seed).shuffle(starts)
    for start in starts:
        part = slice(start, start + BLOCK_SIZE)
        softmax.add(scores[:, part], values[part])
    softmax.check(scores, values[:, 0])


@pytest.mark.parametrize("offset", [1000.0, -1000.0])
def test_scores_of_any_size_give_finite_sums(offset):
    """exp(89) is infinite in float32, and exp(-104) is 0."""
    softmax = RunningSoftmax()
    for score, value in ((offset, 1.0), (offset + log(3), 5.0)):
        softmax.add(*scores_and_values((score, value)))
    assert_close("the totals", softmax.totals, torch.full((GROUP,), 4 / 3), 1e-3)
    assert_close("the sums", softmax.sums, torch.full((GROUP, HEAD_DIM), 16 / 3), 1e-3)


def test_values_past_the_context_are_not_read():
    """The block has 4 slots, and there are scores for 3."""
    softmax, scores, (_, values) = RunningSoftmax(), random_scores(3), random_block(BLOCK_SIZE)
    values[3] = float("nan")
    softmax.add(scores, values)
    softmax.check(scores, values[:3, 0])


# ---- the loop over the block table


def make_cache(num_blocks: int, num_kv_heads: int = 2, block_size: int = BLOCK_SIZE, num_layers: int = 1) -> KVCache:
    """Return a pool of NaN: a slot that is read before it is written would show."""
    config = ModelConfig(320, 32, 48, num_layers, 4, num_kv_heads, HEAD_DIM)
    cache = KVCache(config, num_blocks, block_size, torch.float32, torch.device("cpu"))
    cache.blocks.fill_(float("nan"))
    return cache


def random_qkv(num_tokens: int, num_heads: int = 4, num_kv_heads: int = 2, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (num_heads, num_kv_heads, num_kv_heads)
    return [torch.randn(num_tokens, n, HEAD_DIM, generator=generator) for n in heads]


def slots_of(table: list[int], positions: range, block_size: int) -> list[int]:
    return [table[i // block_size] * block_size + i % block_size for i in positions]


def step_of(*members: tuple[list[int], int, int], block_size: int = BLOCK_SIZE) -> AttentionMetadata:
    """Return a step of sequences, each with its block table, tokens computed before and tokens of this step."""
    width = max(len(table) for table, _, _ in members)
    slots = [slots_of(table, range(before, before + now), block_size) for table, before, now in members]
    return AttentionMetadata(
        query_start_loc=[0, *accumulate(now for _, _, now in members)],
        context_lens=[before + now for _, before, now in members],
        block_tables=torch.tensor([table + table[-1:] * (width - len(table)) for table, _, _ in members]),
        slot_mapping=torch.tensor([*chain(*slots)]),
        new_blocks=torch.empty(0, dtype=torch.int64),  # a kernel has no use for them
    )


def check(*sizes: tuple[int, int], heads: tuple[int, int] = (4, 2), block_size: int = BLOCK_SIZE) -> None:
    """Compare the attention of a step with that of each sequence by itself, without a cache.

    Each sequence has tokens computed before, and tokens of this step. Blocks are scattered over the pool.
    """
    counts = [-(-(before + now) // block_size) for before, now in sizes]
    blocks = random.Random(0).sample(range(sum(counts) + 3), sum(counts))
    tables = [[blocks.pop() for _ in range(count)] for count in counts]
    cache, rows, expected = make_cache(sum(counts) + 3, heads[1], block_size), [], []
    for seed, (table, (before, now)) in enumerate(zip(tables, sizes, strict=True)):
        qkv = random_qkv(before + now, *heads, seed=seed)
        earlier = torch.tensor(slots_of(table, range(before), block_size), dtype=torch.int64)
        cache.write(0, earlier, *(x[:before] for x in qkv[1:]))
        rows.append([x[before:] for x in qkv])
        expected.append(attend_without_cache(0, *qkv)[before:])
    step = step_of(*((table, *size) for table, size in zip(tables, sizes, strict=True)), block_size=block_size)
    out = KernelAttention(cache).plan(step)(0, *(torch.cat(xs) for xs in zip(*rows, strict=True)))
    assert out.shape == (sum(now for _, now in sizes), heads[0], HEAD_DIM), "out has the shape of q"
    for i, (part, (before, now)) in enumerate(zip(out.split([now for _, now in sizes]), sizes, strict=True)):
        for token in range(now):
            who = f"sequence {i} of {len(sizes)}, with {before} tokens before and {now} in this step"
            attention = f"{who}: attention of token {before + token}"
            if part[token].isnan().any():
                why = "the pool is NaN where no token is: a slot was read that has none, or before it was written"
                raise AssertionError(f"{attention} is NaN\n{why}")
            assert_close(attention, part[token], expected[i][token])


@pytest.mark.parametrize("num_tokens", [1, 4, 7])
def test_a_prompt_attends_within_itself(num_tokens):
    check((0, num_tokens))


@pytest.mark.parametrize("before", [3, 4, 13])
def test_a_decoded_token_attends_to_its_past(before):
    check((before, 1))


@pytest.mark.parametrize("size", [(5, 4), (8, 6)])
def test_a_chunk_attends_to_its_past(size):
    check(size)


def test_prompts_chunks_and_decodes_share_a_step():
    check((0, 7), (12, 1), (9, 6), (0, 1), (3, 1), (4, 4))


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2), (1, 1)], ids=str)
def test_query_heads_share_kv_heads(heads):
    check((0, 6), (9, 1), heads=heads)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_blocks_may_have_any_size(block_size):
    check((0, 7), (12, 1), (9, 3), block_size=block_size)


def test_layers_have_keys_of_their_own():
    """A prompt of 5 tokens, and its sixth, in two layers."""
    cache, layers = make_cache(3, num_layers=2), [random_qkv(6, seed=i) for i in range(2)]
    attention = KernelAttention(cache)
    for step, part in ((step_of(([2, 0], 0, 5)), slice(0, 5)), (step_of(([2, 0], 5, 1)), slice(5, 6))):
        attend = attention.plan(step)
        outs = [attend(layer, *(x[part] for x in qkv)) for layer, qkv in enumerate(layers)]
    for layer, (out, qkv) in enumerate(zip(outs, layers, strict=True)):
        assert_close(f"attention of token 5 in layer {layer}", out, attend_without_cache(layer, *qkv)[5:])


def test_a_step_writes_its_own_slots_only():
    """No block is cleared: what an earlier holder left past the end of a sequence is never read."""
    cache, (q, k, v) = make_cache(3), random_qkv(5)
    KernelAttention(cache).plan(step_of(([2, 0], 0, 5)))(0, q, k, v)
    for i, (block, offset) in enumerate([(2, 0), (2, 1), (2, 2), (2, 3), (0, 0)]):
        if not cache.blocks[block, 0, :, offset].equal(torch.stack((k[i], v[i]))):
            raise AssertionError(f"the keys and values of token {i} are not in block {block}, offset {offset}")
    if not (cache.blocks[0, 0, :, 1:].isnan().all() and cache.blocks[1].isnan().all()):
        raise AssertionError("a step writes to the slots of its own tokens only")


def test_items_that_run_at_the_same_time_share_no_array(monkeypatch):
    """Three tokens and two KV heads are six items. Each writes to sums, totals, highest and scores of its own."""
    add_block, items, writers = paged_kernel.add_block, [], []

    def prange(*bounds: int) -> Iterator[int]:
        for item in range(*bounds):
            items.append(item)
            yield item

    def add(*arrays) -> None:
        writers.append((items[-1] if items else 0, arrays))  # arrays that are kept have addresses of their own
        add_block(*arrays)

    monkeypatch.setattr(paged_kernel.numba, "prange", prange)
    monkeypatch.setattr(paged_kernel, "add_block", add)
    check((0, 3))
    for name, place in (("sums", 3), ("totals", 4), ("highest", 5), ("scores", 0)):
        writer_of: dict[int, int] = {}
        for item, arrays in writers:
            first = writer_of.setdefault(arrays[place].ctypes.data, item)
            if first != item:
                raise AssertionError(f"items {first} and {item} of prange write to the same {name}, at the same time")


def test_nothing_is_copied_out_of_the_pool(monkeypatch):
    """A prompt and a decode share a step."""
    monkeypatch.setattr(KVCache, "read", lambda *arguments: pytest.fail("KVCache.read() copies blocks"))
    monkeypatch.setattr(KVCache, "clear", lambda *arguments: pytest.fail("KVCache.clear() is for padding"))
    check((12, 1), (3, 1))


def test_contexts_are_worked_out_once_a_step(monkeypatch):
    """A step goes through three layers."""
    steps = []
    monkeypatch.setattr(kernel_attention, "contexts", lambda step: steps.append(step) or contexts(step))
    cache = make_cache(1, num_layers=3)
    attend = KernelAttention(cache).plan(step_of(([0], 0, 2)))
    for layer in range(3):
        attend(layer, *random_qkv(2))
    assert len(steps) == 1
