"""Attention: store the keys and values of a step, and attend to what each token may see."""

import pytest
import torch
from torch import Tensor

from ..attention import AttentionMetadata, ContiguousAttention, attend_one
from ..kv_cache import KVCache
from ..llama import ModelConfig
from .helpers import attend_without_cache

HEAD_DIM = 8
HEADS = {"every head has its own": (4, 4), "pairs share": (4, 2), "all share one": (4, 1), "one head": (1, 1)}


def model_config(num_kv_heads: int = 2, num_layers: int = 1) -> ModelConfig:
    return ModelConfig(320, 32, 48, num_layers, 4, num_kv_heads, HEAD_DIM)


def make_cache(num_slots: int, num_layers: int = 1) -> KVCache:
    """Return a pool of NaN: a slot that is read before it is written would show."""
    cache = KVCache(model_config(num_layers=num_layers), num_slots, torch.float32, torch.device("cpu"))
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    return cache


def random_qkv(num_tokens: int, num_heads: int = 4, num_kv_heads: int = 2, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (num_heads, num_kv_heads, num_kv_heads)
    return [torch.randn(num_tokens, n, HEAD_DIM, generator=generator) for n in heads]


def step(pieces: list[tuple[int, int, int]]) -> AttentionMetadata:
    """Return a step of sequences, each with its first slot, tokens computed before and tokens of this step."""
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


def test_token_by_token_equals_all_at_once():
    q, k, v = random_qkv(6)
    attention = ContiguousAttention(make_cache(num_slots=20))
    rows = []
    for i in range(6):
        attend = attention.plan(step([(5, i, 1)]))
        rows.append(attend(0, q[i : i + 1], k[i : i + 1], v[i : i + 1]))
    torch.testing.assert_close(torch.cat(rows), attend_without_cache(0, q, k, v))


def test_sequences_of_a_step_do_not_see_each_other():
    """A prompt of 4 tokens, the newest token after 5, and a prompt of 1."""
    attention = ContiguousAttention(make_cache(num_slots=24))
    a, b, c = (random_qkv(n, seed=n) for n in (4, 6, 1))
    attention.plan(step([(8, 0, 5)]))(0, *(x[:5] for x in b))
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


def test_step_writes_its_own_slots_only():
    cache = make_cache(num_slots=10, num_layers=2)
    q, k, v = random_qkv(3)
    ContiguousAttention(cache).plan(step([(4, 0, 2), (9, 0, 1)]))(1, q, k, v)
    assert torch.equal(cache.k[1, [4, 5, 9]], k) and torch.equal(cache.v[1, [4, 5, 9]], v)
    assert cache.k[1, [0, 1, 2, 3, 6, 7, 8]].isnan().all() and cache.k[0].isnan().all()


def test_keys_of_an_earlier_holder_are_not_seen():
    attention = ContiguousAttention(make_cache(num_slots=8))
    attention.plan(step([(0, 0, 8)]))(0, *(1e30 * x for x in random_qkv(8)))
    qkv = random_qkv(3, seed=3)
    attend = attention.plan(step([(2, 0, 3)]))
    torch.testing.assert_close(attend(0, *qkv), attend_without_cache(0, *qkv))


# The pool's tensors


def test_slot_has_a_key_and_a_value_for_each_kv_head_of_each_layer():
    assert make_cache(num_slots=10, num_layers=3).bytes_per_token == 2 * 3 * 2 * HEAD_DIM * 4


def test_reading_copies_nothing():
    cache = make_cache(num_slots=10)
    k, v = cache.read(0, 4, 3)
    assert k.shape == v.shape == (3, 2, HEAD_DIM)
    assert k.data_ptr() == cache.k[0, 4].data_ptr() and v.data_ptr() == cache.v[0, 4].data_ptr()
