"""The kernel: attention that follows each block table to its end, and reads keys and values where they lie.

    item    a token of the step and a KV head; as many are computed at a time as there are cores
    block   the next block_size keys and values of an item: scores, weights, and the weighted values

Nothing is copied, padded or masked. Stage 3 merges tiles, and this merges blocks, by the same online softmax: when a
block has a higher score than all blocks before it, their sums shrink by exp(old highest - new highest).

Numba compiles these functions when they are first called, and keeps the result beside this file. It knows that a part
of an array is contiguous if only the first dimensions are indexed: then a core multiplies several numbers of a key at a
time. Loops compile in less time than operations on whole arrays, and run as fast.
"""

import numba
import numpy as np

FAST_MATH = {"reassoc", "contract"}  # sums in any order, so that several products are added at a time


@numba.njit(fastmath=FAST_MATH, cache=True)
def score_block(query, keys, kv_head, scores):
    """Set scores[head, i] to the product of a query head and the block's key i, divided by the root of head_dim.

    query float32 [group, head_dim]: the query heads that share a KV head are a group
    keys float32 [block_size, num_kv_heads, head_dim]; scores float32 [group, num_keys], num_keys <= block_size
    """
    scale = np.float32(query.shape[1] ** -0.5)
    for head in range(scores.shape[0]):
        for i in range(scores.shape[1]):
            score = np.float32(0)
            for d in range(query.shape[1]):
                score += query[head, d] * keys[i, kv_head, d]
            scores[head, i] = score * scale


@numba.njit(fastmath=FAST_MATH, cache=True)
def add_block(scores, values, kv_head, sums, totals, highest):
    """Add a block to the running softmax of each head. Attention to all keys so far is sums / totals.

    After the call:
        highest   the highest score so far
        totals    the sum of exp(score - highest) over all keys so far
        sums      the sum of exp(score - highest) * value

    scores float32 [group, num_keys]; values float32 [block_size, num_kv_heads, head_dim]
    sums float32 [group, head_dim]; totals, highest float32 [group]. Before the first block: zeros, zeros, and -inf
    """
    for head in range(scores.shape[0]):
        top = max(highest[head], scores[head].max())
        share = np.exp(highest[head] - top)  # 0 for the first block
        highest[head], totals[head] = top, totals[head] * share
        for d in range(sums.shape[1]):
            sums[head, d] *= share
        for i in range(scores.shape[1]):
            weight = np.exp(scores[head, i] - top)
            totals[head] += weight
            for d in range(sums.shape[1]):
                sums[head, d] += weight * values[i, kv_head, d]


@numba.njit(parallel=True, fastmath=FAST_MATH, cache=True)
def paged_attention(out, q, blocks, block_tables, seqs, context_lens, layer):
    """Let each token attend to the first context_lens[token] tokens of its sequence. Write the result to `out`.

    q, out float32 [num_tokens, num_kv_heads, group, head_dim]; seqs, context_lens int64 [num_tokens]
    blocks float32 [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    block_tables int64 [num_seqs, max_blocks]
    """
    num_tokens, num_kv_heads, group, head_dim = q.shape
    block_size = blocks.shape[3]
    for item in numba.prange(num_tokens * num_kv_heads):
        token, kv_head = item // num_kv_heads, item % num_kv_heads
        sums, totals = np.zeros((group, head_dim), np.float32), np.zeros(group, np.float32)
        highest, scores = np.full(group, -np.inf, np.float32), np.empty((group, block_size), np.float32)
        for start in range(0, context_lens[token], block_size):
            block = blocks[block_tables[seqs[token], start // block_size], layer]
            some = scores[:, : context_lens[token] - start]  # the last block may have fewer keys
            score_block(q[token, kv_head], block[0], kv_head, some)
            add_block(some, block[1], kv_head, sums, totals, highest)
        for head in range(group):
            for d in range(head_dim):
                out[token, kv_head, head, d] = sums[head, d] / totals[head]
