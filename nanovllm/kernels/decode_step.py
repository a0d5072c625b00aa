"""A decode step of a few sequences as one compiled function over all layers.

A step of few rows is a walk over the weights: there is little to compute, and each operation of a framework in between
costs more than its own work. Here the weights and the cached keys are read where they lie, once a step.

    phase of a layer   its pieces                     what each worker does first, for itself
    qkv                rows of the weight             norm
    attention          sequence x KV head x split     rotate its heads; write the new key and value
    output             rows of the weight             merge the splits
    gate and up        rows of both                   norm
    down               rows of the weight             -

What comes first is done by each worker that gets a piece: it is little, and cheaper than to wait for somebody.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from .attention import PART, attend, merge, slot
from .exp import exp
from .linear import linear
from .norm import normalize
from .rotary import rotate
from .team import pieces
from .vectors import OPTIONS, at, floats, get, integers, put, read, stored, write

PHASES = 5
SPLIT = 512  # keys of a context that one worker attends to at a time
QKV, OUT, GATE_UP, DOWN = range(4)


class Sizes(NamedTuple):
    workers: int
    hidden_size: int
    num_heads: int
    group: int  # query heads that share a KV head
    intermediate_size: int
    has_head_norms: int
    splits: int  # of the longest context


class Weights(NamedTuple):
    """Addresses of what does not change from step to step."""

    matrices: int  # int64 [num_layers, 4], addresses: qkv, o, gate_up, down
    biases: int  # int64 [num_layers, 4], addresses; 0: none
    norms: int  # [num_layers, 2, hidden_size], float32 as all norms
    head_norms: int  # [num_layers, 2, head_dim], of q and k
    last_norm: int  # [hidden_size]
    embedding: int  # [vocab_size, hidden_size], as it is stored
    cos: int  # [max_model_len, head_dim], as it is stored
    sin: int  # [max_model_len, head_dim], as it is stored
    pool: int  # KVCache.blocks


class Room(NamedTuple):
    """Addresses of what a step works in: float32, but for the last two."""

    x: int  # [rows, hidden_size]
    qkv: int  # [rows, num_heads + 2 * num_kv_heads, head_dim]
    y: int  # [rows, max(hidden_size, 2 * intermediate_size)]
    act: int  # [rows, intermediate_size]
    out: int  # [rows, num_kv_heads, splits, group, head_dim]
    peaks: int  # [rows, num_kv_heads, splits, group]
    sums: int  # [rows, num_kv_heads, splits, group]
    own: int  # [workers, rows, max(hidden_size, num_heads * head_dim)]
    heads: int  # [workers, group + 1, head_dim]
    scores: int  # [workers, group, PART]
    places: int  # int64 [workers, PART]
    counters: int  # int64 [num_layers * PHASES, 2 cache lines]


@njit(parallel=True, **OPTIONS)
def decode_step(token_ids, tables, max_blocks, lens, rows, like, shape, sizes, weights, room, eps, hidden):
    """token_ids, lens int64 [rows], the new token counted; tables int64 [rows, max_blocks]; hidden [rows, hidden_size]

    All of them addresses. like: an array of the type that weights, pool and hidden are stored in; shape: the Pool's
    """
    embed(integers(token_ids), rows, like, shape.num_layers, sizes, weights, room)
    for worker in prange(sizes.workers):
        run_layers(worker, integers(tables), max_blocks, integers(lens), rows, like, shape, sizes, weights, room, eps)
    finish(rows, like, sizes, weights, room, eps, hidden)


@njit(**OPTIONS)
def embed(token_ids, rows, like, num_layers, sizes, weights, room):
    size, embedding, x = sizes.hidden_size, stored(weights.embedding, like), floats(room.x)
    for m in range(rows):
        for i in range(size):
            write(x, m * size + i, read(embedding, get(token_ids, m) * size + i))
    for i in range(num_layers * PHASES * 16):
        put(integers(room.counters), i, 0)


@njit(**OPTIONS)
def finish(rows, like, sizes, weights, room, eps, hidden):
    size = sizes.hidden_size
    for m in range(rows):
        normalize(at(floats(room.x), m * size), floats(weights.last_norm), eps, size, at(stored(hidden, like), m * size))


@njit(**OPTIONS)
def run_layers(worker, tables, max_blocks, lens, rows, like, shape, sizes, weights, room, eps):
    for layer in range(shape.num_layers):
        phase = layer * PHASES
        project_qkv(worker, phase, layer, rows, like, shape, sizes, weights, room, eps)
        attend_all(worker, phase + 1, layer, tables, max_blocks, lens, rows, like, shape, sizes, weights, room, eps)
        project_out(worker, phase + 2, layer, lens, rows, like, shape, sizes, weights, room)
        gate_and_up(worker, phase + 3, layer, rows, like, sizes, weights, room, eps)
        project_down(worker, phase + 4, layer, rows, like, sizes, weights, room)


@njit(**OPTIONS)
def matrix_of(weights, layer, which, like):
    return stored(get(integers(weights.matrices), layer * 4 + which), like)


@njit(**OPTIONS)
def bias_of(weights, layer, which):
    return get(integers(weights.biases), layer * 4 + which)


@njit(**OPTIONS)
def own_room(worker, rows, shape, sizes, room):
    width = max(sizes.hidden_size, sizes.num_heads * shape.head_dim)
    return at(floats(room.own), worker * rows * width)


@njit(**OPTIONS)
def rows_of_piece(outputs, workers):
    """Weight rows of a piece: four pieces a worker, and whole cache lines of what comes out."""
    return -(-outputs // (4 * workers * 16)) * 16


@njit(**OPTIONS)
def normalize_rows(x, rows, size, weight, eps, out):
    for m in range(rows):
        normalize(at(x, m * size), weight, eps, size, at(out, m * size))


@njit(**OPTIONS)
def add_to(x, y, rows, size, start, end):
    """x[m, r] += y[m, r] for r in start .. end - 1"""
    for m in range(rows):
        for i in range(m * size + start, m * size + end):
            write(x, i, read(x, i) + read(y, i))


@njit(**OPTIONS)
def silu_and_mul(gate_up, act, rows, size, start, end):
    """act[m, r] = silu(gate[m, r]) * up[m, r] for r in start .. end - 1. gate_up [rows, 2, size]; act [rows, size]"""
    for m in range(rows):
        for r in range(start, end):
            gate, up = read(gate_up, m * 2 * size + r), read(gate_up, m * 2 * size + size + r)
            write(act, m * size + r, gate / (np.float32(1) + exp(-gate)) * up)


@njit(**OPTIONS)
def project_qkv(worker, phase, layer, rows, like, shape, sizes, weights, room, eps):
    size, outputs = sizes.hidden_size, (sizes.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    own, is_ready, each = own_room(worker, rows, shape, sizes, room), False, rows_of_piece(outputs, sizes.workers)
    weight, bias = matrix_of(weights, layer, QKV, like), bias_of(weights, layer, QKV)
    for piece in pieces(integers(room.counters), phase, -(-outputs // each)):
        if not is_ready:
            normalize_rows(floats(room.x), rows, size, at(floats(weights.norms), layer * 2 * size), eps, own)
            is_ready = True
        start, end = piece * each, min((piece + 1) * each, outputs)
        linear(weight, stored(bias, like), bias != 0, start, end, own, size, rows, floats(room.qkv), outputs)


@njit(**OPTIONS)
def attend_all(worker, phase, layer, tables, max_blocks, lens, rows, like, shape, sizes, weights, room, eps):
    group, size, splits = sizes.group, shape.head_dim, sizes.splits
    pool, heads = stored(weights.pool, like), at(floats(room.heads), worker * (group + 1) * size)
    scores, places = at(floats(room.scores), worker * group * PART), at(integers(room.places), worker * PART)
    for piece in pieces(integers(room.counters), phase, rows * shape.num_kv_heads * splits):
        m, kv, split = piece // splits // shape.num_kv_heads, piece // splits % shape.num_kv_heads, piece % splits
        position, start, table = get(lens, m) - 1, split * SPLIT, at(tables, m * max_blocks)
        if start <= position:
            end = min(position + 1, start + SPLIT)
            cos, sin = stored(weights.cos, like), stored(weights.sin, like)
            cos, sin = at(cos, position * size), at(sin, position * size)
            norms = at(floats(weights.head_norms), layer * 2 * size)
            qkv = at(floats(room.qkv), m * (sizes.num_heads + 2 * shape.num_kv_heads) * size)
            if end == position + 1:
                key = at(qkv, (sizes.num_heads + kv) * size)
                turn(key, norms, sizes.has_head_norms, 1, cos, sin, eps, np.float32(1), size, at(heads, group * size))
                value = at(key, shape.num_kv_heads * size)
                where = slot(shape, layer, kv, get(table, position // shape.block_size), position % shape.block_size)
                copy(at(heads, group * size), size, at(pool, where))
                copy(value, size, at(pool, where + shape.block_size * shape.num_kv_heads * size))
            scale = np.float32(1) / np.sqrt(np.float32(size))
            for g in range(group):
                query = at(qkv, (kv * group + g) * size)
                turn(query, norms, sizes.has_head_norms, 0, cos, sin, eps, scale, size, at(heads, g * size))
            to = piece * group
            out, peaks, sums = at(floats(room.out), to * size), at(floats(room.peaks), to), at(floats(room.sums), to)
            attend(heads, group, group, position, pool, shape, layer, kv, table, start, end, scores, places, out, peaks, sums)


@njit(**OPTIONS)
def copy(x, size, out):
    for i in range(size):
        write(out, i, read(x, i))


@njit(**OPTIONS)
def turn(x, norms, has_norms, which, cos, sin, eps, scale, size, out):
    """A head, normed if the model does that, rotated and scaled. norms [2, size]: of q, of k"""
    if has_norms:
        normalize(x, at(norms, which * size), eps, size, out)
    else:
        copy(x, size, out)
    rotate(out, cos, sin, size)
    for i in range(size):
        write(out, i, read(out, i) * scale)


@njit(**OPTIONS)
def merge_all(lens, rows, shape, sizes, room, own):
    """own [rows, num_heads * head_dim] = what all heads attended to"""
    group, size = sizes.group, shape.head_dim
    for m in range(rows):
        parts = -(-get(lens, m) // SPLIT)
        for kv in range(shape.num_kv_heads):
            i = (m * shape.num_kv_heads + kv) * sizes.splits * group
            out, peaks, sums = at(floats(room.out), i * size), at(floats(room.peaks), i), at(floats(room.sums), i)
            merge(out, peaks, sums, parts, group, size, at(own, (m * sizes.num_heads + kv * group) * size))


@njit(**OPTIONS)
def project_out(worker, phase, layer, lens, rows, like, shape, sizes, weights, room):
    size, outputs = sizes.num_heads * shape.head_dim, sizes.hidden_size
    own, is_ready, each = own_room(worker, rows, shape, sizes, room), False, rows_of_piece(outputs, sizes.workers)
    weight, bias = matrix_of(weights, layer, OUT, like), bias_of(weights, layer, OUT)
    for piece in pieces(integers(room.counters), phase, -(-outputs // each)):
        if not is_ready:
            merge_all(lens, rows, shape, sizes, room, own)
            is_ready = True
        start, end = piece * each, min((piece + 1) * each, outputs)
        linear(weight, stored(bias, like), bias != 0, start, end, own, size, rows, floats(room.y), outputs)
        add_to(floats(room.x), floats(room.y), rows, outputs, start, end)


@njit(**OPTIONS)
def gate_and_up(worker, phase, layer, rows, like, sizes, weights, room, eps):
    size, outputs = sizes.hidden_size, sizes.intermediate_size
    is_ready, each = False, rows_of_piece(outputs, sizes.workers)
    own = at(floats(room.own), worker * rows * size)
    weight, bias = matrix_of(weights, layer, GATE_UP, like), bias_of(weights, layer, GATE_UP)
    for piece in pieces(integers(room.counters), phase, -(-outputs // each)):
        if not is_ready:
            normalize_rows(floats(room.x), rows, size, at(floats(weights.norms), (layer * 2 + 1) * size), eps, own)
            is_ready = True
        start, end = piece * each, min((piece + 1) * each, outputs)
        for first in (0, outputs):
            linear(weight, stored(bias, like), bias != 0, first + start, first + end, own, size, rows, floats(room.y), 2 * outputs)
        silu_and_mul(floats(room.y), floats(room.act), rows, outputs, start, end)


@njit(**OPTIONS)
def project_down(worker, phase, layer, rows, like, sizes, weights, room):
    size, outputs = sizes.intermediate_size, sizes.hidden_size
    each = rows_of_piece(outputs, sizes.workers)
    weight, bias = matrix_of(weights, layer, DOWN, like), bias_of(weights, layer, DOWN)
    for piece in pieces(integers(room.counters), phase, -(-outputs // each)):
        start, end = piece * each, min((piece + 1) * each, outputs)
        linear(weight, stored(bias, like), bias != 0, start, end, floats(room.act), size, rows, floats(room.y), outputs)
        add_to(floats(room.x), floats(room.y), rows, outputs, start, end)


@njit(parallel=True, **OPTIONS)
def head(weight, vocab_size, like, hidden, size, rows, workers, counters, logits):
    """logits float32 [rows, vocab_size] = hidden float32 [rows, size] times each row of the weight"""
    put(integers(counters), 0, 0)
    put(integers(counters), 8, 0)
    for worker in prange(workers):
        head_rows(stored(weight, like), floats(hidden), rows, size, vocab_size, workers, integers(counters), floats(logits))


@njit(**OPTIONS)
def head_rows(weight, hidden, rows, size, vocab_size, workers, counters, logits):
    each = rows_of_piece(vocab_size, 4 * workers)
    for piece in pieces(counters, 0, -(-vocab_size // each)):
        linear(weight, weight, False, piece * each, min((piece + 1) * each, vocab_size), hidden, size, rows, logits, vocab_size)
