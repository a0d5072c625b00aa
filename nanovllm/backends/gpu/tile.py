"""A tile of keys, added to a softmax under way. Read decode.py first: it uses both functions, and so does prefill.py.

The softmax of a row of scores needs their peak and their sum. A program that sees a tile at a time keeps three things,

    peak   [rows]          the largest score so far
    total  [rows]          the sum of exp(score - peak) so far
    out    [rows, width]   the sum of exp(score - peak) * value so far

and when a tile brings a larger peak, it scales the other two down by exp(old peak - new peak). out / total is attention
to what was seen so far. backends/torch does the same with whole tensors.

A function with @triton.jit that a kernel calls is compiled into the kernel: it costs no launch.
"""

import triton
import triton.language as tl


@triton.jit
def find_slots(table, position, is_key, block_stride, slot_stride, BLOCK_SIZE: tl.constexpr):
    """Return where in a layer's keys these positions of a sequence lie, counted in numbers: int64 [TILE].

    table int32 [max_blocks], a pointer; position, is_key [TILE]. What is behind the context is not looked up.
    """
    block = tl.load(table + position // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)  # a pool is beyond 2**31
    return block * block_stride + position % BLOCK_SIZE * slot_stride


@triton.jit
def add_tile(queries, k, v, is_seen, scale, peak, total, out):
    """Attention to a tile, added to that before it; each row has seen a key then. Returns peak, total, out.

    queries [rows, width]; k, v [TILE, width]; is_seen bool, [rows, TILE] or [1, TILE]; scale makes scores powers of 2
    """
    # Tensor cores sum 16-bit products in float32. Of float32 numbers they would drop bits, unless told "ieee".
    scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale  # [rows, TILE]
    scores = tl.where(is_seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])  # [rows, TILE], 0 where nothing is seen
    kept = tl.exp2(peak - new_peak)  # [rows], 0 in the first tile
    out = out * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_peak, total * kept + tl.sum(weights, 1), out
