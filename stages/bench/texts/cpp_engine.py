"""*How PagedAttention Solves the Memory Fragmentation Problem*: its process(), attention, blocks and metrics."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stages.bench.engines import silent
from stages.bench.texts import in_stages, rounded, sequence
from stages.bench.texts.pools import BitmapPool
from stages.s1_contiguous_cache.slot_manager import SlotManager

Array = np.ndarray[Any, Any]
LAYERS, LONGEST, HEADS, DIM = 32, 2048, 32, 128  # of 7B


def forwards(num_prompt: int, num_output: int) -> int:
    """Return how often process() runs the model: for each prompt token but the last, and for each token of output."""
    first = (num_prompt - 1) % 2**64  # a size_t
    return first + num_output


# ---- its attention, which locality.py compiles


def attend(query: Array, keys: Array, values: Array, table: Array, block_size: int, out: Array, count: int) -> None:
    """Attend to `count` tokens: heads outside, tokens inside, each token through the block table.

    query, out [heads, dim]; keys, values [slots, kv_heads, dim]; table [blocks], which is not checked
    """
    heads, dim = query.shape
    scores, total, scale = np.empty(count, np.float32), np.empty(dim, np.float32), np.float32(1 / math.sqrt(dim))
    for head in range(heads):
        q, kv_head = query[head], head * keys.shape[1] // heads
        for token in range(count):
            key = keys[table[token // block_size] * block_size + token % block_size, kv_head]
            score = np.float32(0)
            for i in range(dim):
                score += q[i] * key[i]
            scores[token] = score * scale
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        total[:] = 0
        for token in range(count):
            value = values[table[token // block_size] * block_size + token % block_size, kv_head]
            weight = weights[token]
            for i in range(dim):
                total[i] += weight * value[i]
        out[head] = total


def through(table: list[int], block_size: int = 16) -> Callable[[int], int]:
    """Return the slot of a token by a block table.

    >>> through([5, 2], block_size=4)(6)
    10
    """
    return lambda token: table[token // block_size] * block_size + token % block_size


def addresses(slot_of: Callable[[int], int], count: int) -> list[int]:
    """Return the byte at which each token's key begins, for one head of a layer of 7B."""
    return [4 * slot_of(token) * HEADS * DIM for token in range(count)]


# ---- its blocks, and its metrics


def allocate_sequence(pool: BitmapPool, num_tokens: int) -> list[int]:
    """Take blocks one by one from a bit for each, searched from the start, or return them all and say []."""
    blocks = list[int]()
    for _ in range(-(-num_tokens // 16)):
        if pool.num_free_blocks == 0:
            pool.free_blocks(blocks)
            return []
        blocks += pool.get_new_blocks(1)
    return blocks


def kv_bytes(num_tokens: int) -> int:
    """Return the bytes of keys and values of 7B in fp32. The text multiplies its four `int`s first, in 32 bits."""
    product = (LAYERS * num_tokens * HEADS * DIM + 2**31) % 2**32 - 2**31
    return product * 4 * 2


def comparison() -> tuple[float, float]:
    """Return the MiB of the text's example: reserved, and in blocks."""
    return kv_bytes(LONGEST) / 2**20, kv_bytes(256 // 16 * 16) / 2**20


# ---- cases


def example() -> tuple[str, str]:
    reserved, paged = comparison()
    slots, blocks = SlotManager(LONGEST, "max_model_len", LONGEST, silent("s1")), in_stages.block_manager("s2", 128)
    slots.allocate(sequence("s1", "a", [1] * 256))
    blocks.allocate(sequence("s2", "a", [1] * 256))
    piece, held = (kv_bytes(manager.report().held) / 2**20 for manager in (slots, blocks))
    return (
        f"{reserved:,.0f} MiB reserved, {paged:,.0f} MiB in blocks, {1 - paged / reserved:.1%} less",
        f"{piece:,.0f} MiB in stage 1, {held:,.0f} MiB in stage 2",
    )


def rollback() -> tuple[str, int]:
    pool = BitmapPool(4)
    refused = allocate_sequence(pool, 96)
    return f"{pool.num_free_blocks}; it returns {refused}", in_stages.free_after_refusal()


def attention() -> str:
    rng, table = np.random.default_rng(0), [5, 2, 7]
    q, keys, values = (rng.standard_normal(shape, dtype=np.float32) for shape in ((8, 32), (128, 2, 32), (128, 2, 32)))
    in_order, out = [*map(through(table), range(40))], np.zeros_like(q)
    k, v = (torch.from_numpy(x[in_order]).transpose(0, 1) for x in (keys, values))
    right = torch.nn.functional.scaled_dot_product_attention(torch.from_numpy(q)[:, None], k, v, enable_gqa=True)
    attend(q, keys, values, np.array(table), 16, out, 40)
    return rounded(float(np.abs(out - right[:, 0].numpy()).max()))


def jump() -> str:
    first, second = addresses(lambda token: token, 2)
    return f"{(second - first) // 1024} KB"


def singly() -> str:
    return f"{forwards(256, 1)} times"


def empty() -> str:
    return f"{forwards(0, 0):,}"


def overflow() -> int:
    return kv_bytes(32_768)
