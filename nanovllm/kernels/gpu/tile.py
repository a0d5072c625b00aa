"""A tile of keys, added to a softmax under way. Read decode.py first: it uses all three functions, and so does prefill.

The softmax of a row of scores needs their peak and their sum. A program that sees a tile at a time keeps three things,

    peak   [rows]          the largest score so far
    total  [rows]          the sum of exp(score - peak) so far
    out    [rows, width]   the sum of exp(score - peak) * value so far

and when a tile brings a larger peak, it scales the other two down by exp(old peak - new peak). out / total is attention
to what was seen so far. core/online_softmax.py does the same with whole tensors.

A function with @triton.jit that a kernel calls is compiled into the kernel: it costs no launch.
"""

import os

import triton
import triton.language as tl

# Triton's interpreter keeps bfloat16 as bits, and its tl.dot would multiply the bits as integers.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def dot(a, b):
    """The product of two matrices, summed in float32: a [m, k]; b [k, n] -> [m, n]. Each of m, k, n is 16 or more.

    A GPU's tensor cores multiply 16-bit numbers. Float32 ones they would round to 19 bits, unless told "ieee".
    """
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def find_slots(table, position, is_key, block_stride, slot_stride, BLOCK_SIZE: tl.constexpr):
    """Where in a layer's keys these positions of a sequence lie, in numbers from the first: int64 [TILE].

    table int32 [max_blocks], a pointer; position, is_key [TILE]. What is behind the context is not looked up.
    """
    block = tl.load(table + position // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)  # a pool is beyond 2**31
    return block * block_stride + position % BLOCK_SIZE * slot_stride


@triton.jit
def add_tile(queries, k, v, is_seen, scale, peak, total, out):
    """Attention to a tile, added to that before it; each row has seen a key then. Returns peak, total, out.

    queries [rows, width]; k, v [TILE, width]; is_seen bool, [rows, TILE] or [1, TILE]; scale makes scores powers of 2
    """
    scores = tl.where(is_seen, dot(queries, tl.trans(k)) * scale, float("-inf"))  # [rows, TILE]
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])  # [rows, TILE], 0 where nothing is seen
    kept = tl.exp2(peak - new_peak)  # [rows], 0 in the first tile
    out = out * kept[:, None] + dot(weights.to(v.dtype), v)
    return new_peak, total * kept + tl.sum(weights, 1), out
