"""*How PagedAttention Solves the Memory Fragmentation Problem*: its process(), attention, blocks and metrics."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stages.bench.engines import silent
from stages.bench.texts import Cases, attempt, rounded, sequence
from stages.s1_contiguous_cache.slot_manager import SlotManager
from stages.s2_block_manager.block_manager import BlockManager

Floats = np.ndarray[Any, np.dtype[np.float32]]
OF_7B = (32, 2048, 32, 128)  # layers, tokens, KV heads, head size


def forwards(num_prompt: int, num_output: int) -> int:
    """Return how often process() runs the model: for each prompt token but the last, and for each token of output."""
    first = (num_prompt - 1) % 2**64  # a size_t
    return first + num_output


# ---- its attention, as a plain loop


def attention(q: Floats, keys: Floats, values: Floats, slot_of: Callable[[int], int], count: int) -> Floats:
    """Attend to `count` tokens: heads outside, tokens inside. `slot_of` returns the slot of a token.

    q [num_heads, head_dim]; keys, values [num_slots, num_kv_heads, head_dim] -> [num_heads, head_dim]
    """
    out = np.zeros_like(q)
    heads_per_kv = len(q) // keys.shape[1]
    for head, query in enumerate(q):
        kv_head, scores = head // heads_per_kv, np.zeros(count, dtype=np.float32)
        for token in range(count):
            scores[token] = query @ keys[slot_of(token), kv_head] / np.sqrt(np.float32(len(query)))
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        for token in range(count):
            out[head] += weights[token] * values[slot_of(token), kv_head]
    return out


def through(table: list[int], block_size: int = 16) -> Callable[[int], int]:
    """Return the slot of a token by a block table.

    >>> through([5, 2], block_size=4)(6)
    10
    """
    return lambda token: table[token // block_size] * block_size + token % block_size


def largest_difference() -> float:
    """Return how far its paged attention is from torch's, on 40 tokens in scattered blocks."""
    rng, slot_of = np.random.default_rng(0), through([5, 2, 7])
    q, keys, values = (rng.standard_normal(shape, dtype=np.float32) for shape in ((8, 32), (128, 2, 32), (128, 2, 32)))
    in_order = [slot_of(token) for token in range(40)]
    k, v = (torch.from_numpy(x[in_order]).transpose(0, 1) for x in (keys, values))
    right = torch.nn.functional.scaled_dot_product_attention(torch.from_numpy(q)[:, None], k, v, enable_gqa=True)
    return float(np.abs(attention(q, keys, values, slot_of, 40) - right[:, 0].numpy()).max())


def addresses(slot_of: Callable[[int], int], count: int, shape: tuple[int, int, int, int] = OF_7B) -> list[int]:
    """Return the byte at which each token's key begins, for one head."""
    return [4 * slot_of(token) * shape[2] * shape[3] for token in range(count)]


# ---- its blocks, and its metrics


class Bits:
    """The text's BlockManager: a bit for each block, searched from the start, and rollback."""

    def __init__(self, num_blocks: int) -> None:
        self.free = [True] * num_blocks

    def allocate_block(self) -> int:
        """Return a block, or -1."""
        for block, is_free in enumerate(self.free):
            if is_free:
                self.free[block] = False
                return block
        return -1

    def allocate_sequence(self, num_tokens: int) -> list[int]:
        blocks = list[int]()
        for _ in range(-(-num_tokens // 16)):
            blocks.append(self.allocate_block())
            if blocks[-1] < 0:
                self.free_blocks(blocks[:-1])
                return []
        return blocks

    def free_blocks(self, blocks: list[int]) -> None:
        for block in blocks:
            self.free[block] = True


def kv_bytes(layers: int, tokens: int, heads: int, dim: int) -> int:
    """Return the bytes of keys and values in fp32. The text multiplies its four `int`s first, in 32 bits."""
    product = (layers * tokens * heads * dim + 2**31) % 2**32 - 2**31
    return product * 4 * 2


def comparison() -> tuple[float, float]:
    """Return the MiB of the text's example: reserved, and in blocks."""
    layers, longest, *rest = OF_7B
    return kv_bytes(layers, longest, *rest) / 2**20, kv_bytes(layers, 256 // 16 * 16, *rest) / 2**20


def comparison_of_stages() -> tuple[float, float]:
    """Return the same, from the slots that stages 1 and 2 hold."""
    layers, longest, heads, dim = OF_7B
    slots = SlotManager(longest, "max_model_len", longest, silent("s1"))
    blocks = BlockManager(longest // 16, 16, silent("s2"))
    for name, manager in (("s1", slots), ("s2", blocks)):
        manager.allocate(sequence(name, "a", [1] * 256))
    held = [manager.report().held for manager in (slots, blocks)]
    return held[0] * layers * heads * dim * 8 / 2**20, held[1] * layers * heads * dim * 8 / 2**20


def cases() -> Cases:
    (reserved, paged), ours, pool, stage = (
        comparison(),
        comparison_of_stages(),
        Bits(4),
        BlockManager(4, 16, silent("s2")),
    )
    refused, jump = pool.allocate_sequence(96), addresses(lambda token: token, 2)
    attempt(lambda: stage.allocate(sequence("s2", "a", [1] * 96)))
    return {
        "example": (
            f"{reserved:,.0f} MiB reserved, {paged:,.0f} MiB in blocks, {1 - paged / reserved:.1%} less",
            f"{ours[0]:,.0f} MiB in stage 1, {ours[1]:,.0f} MiB in stage 2",
        ),
        "rollback": (f"{sum(pool.free)}; it returns {refused}", f"{len(stage.pool.free)}"),
        "attention": (rounded(largest_difference()),),
        "jump": (f"{(jump[1] - jump[0]) // 1024} KB",),
        "singly": (f"{forwards(256, 1)} times",),
        "empty": (f"{forwards(0, 0):,}",),
        "overflow": (f"{kv_bytes(32, 32_768, 32, 128)}",),
    }
