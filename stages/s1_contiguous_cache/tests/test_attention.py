"""`attend`: store this step's keys and values, and let each token see its own past and nothing else."""

import pytest
import torch
from torch import Tensor

from ..attention import AttentionMetadata, ContiguousAttention, attend_one
from ..kv_cache import KVCache, bytes_per_token
from ..llama import ModelConfig
from .helpers import attend_without_cache

HEAD_DIM = 8
HEADS = {"every head has its own": (4, 4), "pairs share": (4, 2), "all share one": (4, 1), "one head": (1, 1)}


def model_config(num_kv_heads: int = 2, num_layers: int = 1) -> ModelConfig:
    return ModelConfig(320, 32, 48, num_layers, 4, num_kv_heads, HEAD_DIM)


def make_cache(num_slots: int, num_layers: int = 1) -> KVCache:
    """A pool in which every slot that is read before it is written would be seen."""
    cache = KVCache(model_config(num_layers=num_layers), num_slots, torch.float32, torch.device("cpu"))
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    return cache


def random_qkv(num_tokens: int, num_heads: int = 4, num_kv_heads: int = 2, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (num_heads, num_kv_heads, num_kv_heads)
    return [torch.randn(num_tokens, n, HEAD_DIM, generator=generator) for n in heads]


def step(pieces: list[tuple[int, int, int]]) -> AttentionMetadata:
    """A step in which each sequence (first slot, tokens computed before, tokens now) computes its next tokens."""
    query_start_loc: list[int] = [0]
    slots: list[int] = []
    for first, before, now in pieces:
        query_start_loc.append(query_start_loc[-1] + now)
        slots += range(first + before, first + before + now)
    return AttentionMetadata(
        query_start_loc=query_start_loc,
        context_lens=[before + now for _, before, now in pieces],
        first_slots=[first for first, _, _ in pieces],
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
    attention = ContiguousAttention(make_cache(num_slots=20))
    rows = []
    for i in range(6):
        attend = attention.plan(step([(5, i, 1)]))
        rows.append(attend(0, q[i : i + 1], k[i : i + 1], v[i : i + 1]))
    torch.testing.assert_close(torch.cat(rows), attend_without_cache(0, q, k, v))


def test_sequences_in_one_step_do_not_see_each_other():
    """A prompt of 4, the newest token after 5, and a prompt of 1, in pieces that lie in another order in the pool."""
    attention = ContiguousAttention(make_cache(num_slots=24))
    a, b, c = (random_qkv(n, seed=n) for n in (4, 6, 1))
    attend = attention.plan(step([(8, 0, 5)]))
    attend(0, *(x[:5] for x in b))
    attend = attention.plan(step([(16, 0, 4), (8, 5, 1), (0, 0, 1)]))
    out = attend(0, *(torch.cat((x, y[5:], z)) for x, y, z in zip(a, b, c, strict=True)))
    alone = torch.cat((attend_without_cache(0, *a), attend_without_cache(0, *b)[5:], attend_without_cache(0, *c)))
    torch.testing.assert_close(out, alone)


def test_layers_do_not_see_each_other():
    attention = ContiguousAttention(make_cache(num_slots=8, num_layers=2))
    layers = [random_qkv(3, seed=1), random_qkv(3, seed=2)]
    attend = attention.plan(step([(2, 0, 2)]))
    for layer, qkv in enumerate(layers):
        attend(layer, *(x[:2] for x in qkv))
    attend = attention.plan(step([(2, 2, 1)]))
    for layer, qkv in enumerate(layers):
        out = attend(layer, *(x[2:] for x in qkv))
        torch.testing.assert_close(out, attend_without_cache(layer, *qkv)[2:])


def test_a_step_writes_its_own_slots_and_no_others():
    cache = make_cache(num_slots=10, num_layers=2)
    attention = ContiguousAttention(cache)
    q, k, v = random_qkv(3)
    attend = attention.plan(step([(4, 0, 2), (9, 0, 1)]))
    attend(1, q, k, v)
    assert torch.equal(cache.k[1, [4, 5, 9]], k) and torch.equal(cache.v[1, [4, 5, 9]], v)
    assert cache.k[1, [0, 1, 2, 3, 6, 7, 8]].isnan().all() and cache.k[0].isnan().all()


def test_what_an_earlier_holder_left_in_the_slots_is_not_seen():
    attention = ContiguousAttention(make_cache(num_slots=8))
    attend = attention.plan(step([(0, 0, 8)]))
    attend(0, *(1e30 * x for x in random_qkv(8)))
    qkv = random_qkv(3, seed=3)
    attend = attention.plan(step([(2, 0, 3)]))
    torch.testing.assert_close(attend(0, *qkv), attend_without_cache(0, *qkv))


def test_a_batch_that_is_not_the_one_announced_is_refused():
    attend = ContiguousAttention(make_cache(num_slots=8)).plan(step([(0, 0, 3)]))
    with pytest.raises(AssertionError, match="2 queries, the step has 3"):
        attend(0, *random_qkv(2))


def test_a_plan_for_the_next_step_leaves_this_ones_as_it_was():
    """An attend knows its own step: there is no step that the backend is in."""
    attention = ContiguousAttention(make_cache(num_slots=8))
    a, b = random_qkv(3, seed=1), random_qkv(5, seed=2)
    first, second = attention.plan(step([(0, 0, 3)])), attention.plan(step([(3, 0, 5)]))
    torch.testing.assert_close(second(0, *b), attend_without_cache(0, *b))
    torch.testing.assert_close(first(0, *a), attend_without_cache(0, *a))


# The pool's tensors


def test_a_slot_holds_a_key_and_a_value_for_each_kv_head_of_each_layer():
    cache = make_cache(num_slots=10, num_layers=3)
    num_bytes = cache.k.numel() * cache.k.itemsize + cache.v.numel() * cache.v.itemsize
    assert bytes_per_token(model_config(num_layers=3), torch.float32) == 2 * 3 * 2 * 8 * 4 == num_bytes // 10
    assert bytes_per_token(model_config(num_layers=3), torch.bfloat16) == 2 * 3 * 2 * 8 * 2


def test_reading_copies_nothing():
    cache = make_cache(num_slots=10)
    k, v = cache.read(0, 4, 3)
    assert k.shape == v.shape == (3, 2, HEAD_DIM)
    assert k.data_ptr() == cache.k[0, 4].data_ptr() and v.data_ptr() == cache.v[0, 4].data_ptr()


def test_a_pool_that_memory_cannot_hold_is_refused_in_slots_and_bytes():
    with pytest.raises(ValueError, match=r"cpu has no room for a pool of 1,000,000,000,000,000 slots, 128,0"):
        KVCache(model_config(), 10**15, torch.float32, torch.device("cpu"))
