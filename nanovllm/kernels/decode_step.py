"""A decode step of a few sequences as one compiled function over all layers.

A step of few rows is a walk over the weights: there is little to compute, and each operation of a framework in between
costs more than its own work. Here the weights and the cached keys are read where they lie, once a step.

    phase of a layer   its pieces                     what each worker does first, for itself
    qkv                rows of the weight             norm
    attention          sequence x KV head x split     rotate its heads; write the new key and value
    output             rows of the weight             merge the splits
    gate and up        rows of both                   norm
    down               rows of the weight             -

and once a step: the head, rows of its weight, after the last norm. What comes first is done by each worker that gets a
piece: it is little, and cheaper than to wait for somebody.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from .attention import PART, attend, merge, slot
from .exp import exp
from .linear import linear
from .norm import normalize
from .rotary import rotate
from .team import open_phases, pieces, show, wait_for_step
from .vectors import OPTIONS, at, floats, get, integers, put, read, stored, write

PHASES = 5
SPLIT = 512  # keys of a context that one worker attends to at a time
QKV, OUT, GATE_UP, DOWN = range(4)


class Step(NamedTuple):
    """One step. All but the numbers are addresses."""

    number: int  # 1, 2, ...
    token_ids: int  # int64 [rows]
    tables: int  # int64 [rows, max_blocks]
    max_blocks: int
    lens: int  # int64 [rows], of the contexts, the new token counted
    rows: int
    splits: int  # of the longest context
    hidden: int  # [rows, hidden_size], as the model stores it: goes out
    logits: int  # float32 [rows, vocab_size]: goes out


class Sizes(NamedTuple):
    workers: int
    hidden_size: int
    num_heads: int
    group: int  # query heads that share a KV head
    intermediate_size: int
    has_head_norms: int
    vocab_size: int


class Weights(NamedTuple):
    """Addresses of what does not change from step to step."""

    matrices: int  # int64 [num_layers, 4], addresses: qkv, o, gate_up, down
    biases: int  # int64 [num_layers, 4], addresses; 0: none
    norms: int  # [num_layers, 2, hidden_size], float32 as all norms
    head_norms: int  # [num_layers, 2, head_dim], of q and k
    last_norm: int  # [hidden_size]
    embedding: int  # [vocab_size, hidden_size], as it is stored
    head: int  # [vocab_size, hidden_size], as it is stored
    cos: int  # [max_model_len, head_dim], as it is stored
    sin: int  # [max_model_len, head_dim], as it is stored
    pool: int  # KVCache.blocks


class Room(NamedTuple):
    """Addresses of what a step works in: float32, but for the last two. `splits` is that of the longest context."""

    x: int  # [rows, hidden_size]
    qkv: int  # [rows, num_heads + 2 * num_kv_heads, head_dim]
    y: int  # [rows, max(hidden_size, 2 * intermediate_size)]
    act: int  # [rows, intermediate_size]
    out: int  # [rows, num_kv_heads, splits, group, head_dim]
    peaks: int  # [rows, num_kv_heads, splits, group]
    sums: int  # [rows, num_kv_heads, splits, group]
    own: int  # [workers, rows, max(hidden_size, num_heads * head_dim)]
    heads: int  # [workers, group + 1, head_dim]
    scores: int  # [workers, 4 * PART]
    places: int  # int64 [workers, PART]
    counters: int  # int64 [num_layers * PHASES + 1, a cache line]
    mailbox: int  # int64 [9], the newest Step


@njit(**OPTIONS)
def decode_step(worker, seen, step, like, shape, sizes, weights, room, eps):
    """Worker 0 runs `step`, with whatever helpers come. A helper takes part in all steps after `seen`, until none comes
    for a while. Returns the number of the last step seen.

    like: an array of the type that weights, pool and hidden are stored in; shape: the Pool's
    """
    mailbox = integers(room.mailbox)
    if worker == 0:
        open_phases(integers(room.counters), shape.num_layers * PHASES + 1, step.number)
        embed(step, like, sizes, weights, room)
        post(step, mailbox)
    while True:
        number = wait_for_step(mailbox, seen)
        if number == seen:
            return seen
        seen = number
        run_layers(worker, posted(number, mailbox), like, shape, sizes, weights, room, eps)
        if worker == 0:
            return seen


@njit(**OPTIONS)
def post(step, mailbox):
    put(mailbox, 1, step.token_ids)
    put(mailbox, 2, step.tables)
    put(mailbox, 3, step.max_blocks)
    put(mailbox, 4, step.lens)
    put(mailbox, 5, step.rows)
    put(mailbox, 6, step.splits)
    put(mailbox, 7, step.hidden)
    put(mailbox, 8, step.logits)
    show(mailbox, 0, step.number)


@njit(**OPTIONS)
def posted(number, mailbox):
    """May be torn where the step is over; then no phase has a piece left."""
    return Step(number, get(mailbox, 1), get(mailbox, 2), get(mailbox, 3), get(mailbox, 4), get(mailbox, 5),
        get(mailbox, 6), get(mailbox, 7), get(mailbox, 8))  # fmt: skip


@njit(**OPTIONS)
def embed(step, like, sizes, weights, room):
    size, embedding, x = sizes.hidden_size, stored(weights.embedding, like), floats(room.x)
    for m in range(step.rows):
        for i in range(size):
            write(x, m * size + i, read(embedding, get(integers(step.token_ids), m) * size + i))


@njit(**OPTIONS)
def run_layers(worker, step, like, shape, sizes, weights, room, eps):
    for layer in range(shape.num_layers):
        phase = layer * PHASES
        project_qkv(worker, phase, layer, step, like, shape, sizes, weights, room, eps)
        attend_all(worker, phase + 1, layer, step, like, shape, sizes, weights, room, eps)
        project_out(worker, phase + 2, layer, step, like, shape, sizes, weights, room)
        gate_and_up(worker, phase + 3, layer, step, like, shape, sizes, weights, room, eps)
        project_down(worker, phase + 4, layer, step, like, sizes, weights, room)
    head(worker, shape.num_layers * PHASES, step, like, shape, sizes, weights, room, eps)


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
def project_qkv(worker, phase, layer, step, like, shape, sizes, weights, room, eps):
    rows, size, outputs = step.rows, sizes.hidden_size, (sizes.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    own, is_ready, each = own_room(worker, rows, shape, sizes, room), False, rows_of_piece(outputs, sizes.workers)
    weight, bias = matrix_of(weights, layer, QKV, like), bias_of(weights, layer, QKV)
    for piece in pieces(integers(room.counters), phase, step.number, -(-outputs // each)):
        if not is_ready:
            normalize_rows(floats(room.x), rows, size, at(floats(weights.norms), layer * 2 * size), eps, own)
            is_ready = True
        start, end = piece * each, min((piece + 1) * each, outputs)
        linear(weight, stored(bias, like), bias != 0, start, end, own, size, rows, floats(room.qkv), outputs)


@njit(**OPTIONS)
def attend_all(worker, phase, layer, step, like, shape, sizes, weights, room, eps):
    rows, splits, group, size = step.rows, step.splits, sizes.group, shape.head_dim
    pool, heads = stored(weights.pool, like), at(floats(room.heads), worker * (group + 1) * size)
    scores, places = at(floats(room.scores), worker * 4 * PART), at(integers(room.places), worker * PART)
    for piece in pieces(integers(room.counters), phase, step.number, rows * shape.num_kv_heads * splits):
        m, kv, split = piece // splits // shape.num_kv_heads, piece // splits % shape.num_kv_heads, piece % splits
        position, start, table = get(integers(step.lens), m) - 1, split * SPLIT, at(integers(step.tables), m * step.max_blocks)
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
def merge_all(lens, rows, splits, shape, sizes, room, own):
    """own [rows, num_heads * head_dim] = what all heads attended to"""
    group, size = sizes.group, shape.head_dim
    for m in range(rows):
        parts = -(-get(lens, m) // SPLIT)
        for kv in range(shape.num_kv_heads):
            i = (m * shape.num_kv_heads + kv) * splits * group
            out, peaks, sums = at(floats(room.out), i * size), at(floats(room.peaks), i), at(floats(room.sums), i)
            merge(out, peaks, sums, parts, group, size, at(own, (m * sizes.num_heads + kv * group) * size))


@njit(**OPTIONS)
def project_out(worker, phase, layer, step, like, shape, sizes, weights, room):
    rows, size, outputs = step.rows, sizes.num_heads * shape.head_dim, sizes.hidden_size
    own, is_ready, each = own_room(worker, rows, shape, sizes, room), False, rows_of_piece(outputs, sizes.workers)
    weight, bias = matrix_of(weights, layer, OUT, like), bias_of(weights, layer, OUT)
    for piece in pieces(integers(room.counters), phase, step.number, -(-outputs // each)):
        if not is_ready:
            merge_all(integers(step.lens), rows, step.splits, shape, sizes, room, own)
            is_ready = True
        start, end = piece * each, min((piece + 1) * each, outputs)
        linear(weight, stored(bias, like), bias != 0, start, end, own, size, rows, floats(room.y), outputs)
        add_to(floats(room.x), floats(room.y), rows, outputs, start, end)


@njit(**OPTIONS)
def gate_and_up(worker, phase, layer, step, like, shape, sizes, weights, room, eps):
    rows, size, outputs = step.rows, sizes.hidden_size, sizes.intermediate_size
    own, is_ready, each = own_room(worker, rows, shape, sizes, room), False, rows_of_piece(outputs, sizes.workers)
    weight, bias = matrix_of(weights, layer, GATE_UP, like), bias_of(weights, layer, GATE_UP)
    for piece in pieces(integers(room.counters), phase, step.number, -(-outputs // each)):
        if not is_ready:
            normalize_rows(floats(room.x), rows, size, at(floats(weights.norms), (layer * 2 + 1) * size), eps, own)
            is_ready = True
        start, end = piece * each, min((piece + 1) * each, outputs)
        for first in (0, outputs):
            linear(weight, stored(bias, like), bias != 0, first + start, first + end, own, size, rows, floats(room.y), 2 * outputs)
        silu_and_mul(floats(room.y), floats(room.act), rows, outputs, start, end)


@njit(**OPTIONS)
def project_down(worker, phase, layer, step, like, sizes, weights, room):
    rows, size, outputs = step.rows, sizes.intermediate_size, sizes.hidden_size
    each = rows_of_piece(outputs, sizes.workers)
    weight, bias = matrix_of(weights, layer, DOWN, like), bias_of(weights, layer, DOWN)
    for piece in pieces(integers(room.counters), phase, step.number, -(-outputs // each)):
        start, end = piece * each, min((piece + 1) * each, outputs)
        linear(weight, stored(bias, like), bias != 0, start, end, floats(room.act), size, rows, floats(room.y), outputs)
        add_to(floats(room.x), floats(room.y), rows, outputs, start, end)


@njit(**OPTIONS)
def head(worker, phase, step, like, shape, sizes, weights, room, eps):
    """The last norm, and the logits of all rows."""
    size, outputs, own = sizes.hidden_size, sizes.vocab_size, own_room(worker, step.rows, shape, sizes, room)
    is_ready, each = False, rows_of_piece(outputs, 4 * sizes.workers)
    weight, logits = stored(weights.head, like), floats(step.logits)
    for piece in pieces(integers(room.counters), phase, step.number, -(-outputs // each)):
        if not is_ready:
            normalize_rows(floats(room.x), step.rows, size, floats(weights.last_norm), eps, own)
            is_ready = True
        if piece == 0:
            for i in range(step.rows * size):
                write(stored(step.hidden, like), i, read(own, i))
        start, end = piece * each, min((piece + 1) * each, outputs)
        linear(weight, weight, False, start, end, own, size, step.rows, logits, outputs)
