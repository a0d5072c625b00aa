"""The phases of a step of few rows. All workers go through them together; a phase's pieces go to whoever is free.

    phase of a layer   its pieces                     what each worker does first, for itself
    qkv                rows of the weight             norm
    attention          sequence x KV head x split     rotate the heads; write the new key and value
    output             rows of the weight             merge the splits
    gate and up        rows of both                   norm
    down               rows of the weight             -

and once a step the logits: rows of the head, after the last norm. What comes first is done by each worker that gets a
piece: it is little, and cheaper than to wait for somebody.
"""

import numpy as np
from numba import njit

from .activation import silu_and_mul
from .attention import PART, PLACES, attend, merge, slot
from .linear import linear
from .matmul import columns_of_piece, matmul
from .norm import normalize
from .rotary import copy, turn
from .step_parts import Model, Step
from .team import pieces
from .vectors import OPTIONS, Memory, at, floats, get, integers, read, stored, write

PHASES = 5
SPLIT = 512  # keys of a context that one worker attends to at a time
QKV, OUT, GATE_UP, DOWN = range(4)
FEW = 4  # rows: up to so many, the weights are read as they lie


@njit(**OPTIONS)
def project_qkv(worker: int, phase: int, layer: int, step: Step, model: Model) -> None:
    size = model.sizes.hidden_size
    outputs = (model.sizes.num_heads + 2 * model.shape.num_kv_heads) * model.shape.head_dim
    own, is_ready, each = own_room(worker, step, model), False, columns_of_piece(outputs, model.sizes.workers)
    for piece in pieces(integers(model.room.counters), phase, step.number, -(-outputs // each)):
        if not is_ready:
            normalize_rows(floats(model.room.x), step.rows, size, layer * 2, model, own)
            is_ready = True
        start, end = piece * each, min((piece + 1) * each, outputs)
        multiply(QKV, layer, start, end, own, size, floats(model.room.qkv), outputs, step, model)


@njit(**OPTIONS)
def attend_all(worker: int, phase: int, layer: int, step: Step, model: Model) -> None:
    num_kv_heads, size = model.shape.num_kv_heads, model.shape.head_dim
    heads = at(floats(model.room.heads), worker * (model.sizes.group + 1) * size)
    for piece in pieces(integers(model.room.counters), phase, step.number, step.rows * num_kv_heads * step.splits):
        row, kv, split = piece // step.splits // num_kv_heads, piece // step.splits % num_kv_heads, piece % step.splits
        position, start = get(integers(step.lens), row) - 1, split * SPLIT
        if start <= position:
            end = min(position + 1, start + SPLIT)
            if end == position + 1:
                write_key_and_value(layer, row, kv, position, heads, step, model)
            rotate_queries(layer, row, kv, position, heads, model)
            attend_split(worker, layer, row, kv, position, start, end, piece, heads, step, model)


@njit(**OPTIONS)
def attend_split(
    worker: int, layer: int, row: int, kv: int, position: int, start: int, end: int, piece: int, heads: Memory,
    step: Step, model: Model,
) -> None:  # fmt: skip
    """Attend with the query heads that share a KV head to the keys start .. end - 1. heads float32 [group, head_dim]"""
    room, shape, group, to = model.room, model.shape, model.sizes.group, piece * model.sizes.group
    pool, table = stored(model.weights.pool, model.like), at(integers(step.tables), row * step.max_blocks)
    scores, places = at(floats(room.scores), worker * 4 * PART), at(integers(room.places), worker * PLACES)
    out, peaks, sums = at(floats(room.out), to * shape.head_dim), at(floats(room.peaks), to), at(floats(room.sums), to)
    attend(heads, group, group, position, pool, shape, layer, kv, table, start, end, scores, places, out, peaks, sums)


@njit(**OPTIONS)
def rotate_queries(layer: int, row: int, kv: int, position: int, heads: Memory, model: Model) -> None:
    """heads float32 [group, head_dim]"""
    size = model.shape.head_dim
    scale = np.float32(1) / np.sqrt(np.float32(size))
    for g in range(model.sizes.group):
        head = kv * model.sizes.group + g
        turn_head(layer, row, head, 0, position, scale, at(heads, model.sizes.group * size), at(heads, g * size), model)


@njit(**OPTIONS)
def write_key_and_value(layer: int, row: int, kv: int, position: int, heads: Memory, step: Step, model: Model) -> None:
    """Into the slot of the new token. heads: room to work in"""
    shape = model.shape
    block = get(integers(step.tables), row * step.max_blocks + position // shape.block_size)
    key = at(stored(model.weights.pool, model.like), slot(shape, layer, kv, block, position % shape.block_size))
    turn_head(layer, row, model.sizes.num_heads + kv, 1, position, np.float32(1), heads, key, model)
    value = model.sizes.num_heads + shape.num_kv_heads + kv
    to = at(key, shape.block_size * shape.num_kv_heads * shape.head_dim)
    copy(head_of(row, value, model), shape.head_dim, np.float32(1), to)


@njit(**OPTIONS)
def turn_head(
    layer: int, row: int, head: int, which: int, position: int, scale: float, own: Memory, out: Memory, model: Model
) -> None:
    """which: 0 for a query, 1 for a key"""
    weights, size, like = model.weights, model.shape.head_dim, model.like
    cos, sin = at(stored(weights.cos, like), position * size), at(stored(weights.sin, like), position * size)
    norm = weights.head_norms + 4 * (layer * 2 + which) * size if weights.head_norms else 0
    turn(head_of(row, head, model), norm, 1, cos, sin, model.eps, scale, size, own, out)


@njit(**OPTIONS)
def head_of(row: int, head: int, model: Model) -> Memory:
    heads = model.sizes.num_heads + 2 * model.shape.num_kv_heads
    return at(floats(model.room.qkv), (row * heads + head) * model.shape.head_dim)


@njit(**OPTIONS)
def project_out(worker: int, phase: int, layer: int, step: Step, model: Model) -> None:
    size, outputs = model.sizes.num_heads * model.shape.head_dim, model.sizes.hidden_size
    own, is_ready, each = own_room(worker, step, model), False, columns_of_piece(outputs, model.sizes.workers)
    for piece in pieces(integers(model.room.counters), phase, step.number, -(-outputs // each)):
        if not is_ready:
            merge_splits(own, step, model)
            is_ready = True
        start, end = piece * each, min((piece + 1) * each, outputs)
        multiply(OUT, layer, start, end, own, size, floats(model.room.y), outputs, step, model)
        add_to(floats(model.room.x), floats(model.room.y), step.rows, outputs, start, end)


@njit(**OPTIONS)
def merge_splits(own: Memory, step: Step, model: Model) -> None:
    """own [rows, num_heads * head_dim] = what all heads attended to"""
    room, group, size = model.room, model.sizes.group, model.shape.head_dim
    for row in range(step.rows):
        parts = -(-get(integers(step.lens), row) // SPLIT)
        for kv in range(model.shape.num_kv_heads):
            i = (row * model.shape.num_kv_heads + kv) * step.splits * group
            out, peaks, sums = at(floats(room.out), i * size), at(floats(room.peaks), i), at(floats(room.sums), i)
            merge(out, peaks, sums, parts, group, size, at(own, (row * model.sizes.num_heads + kv * group) * size))


@njit(**OPTIONS)
def gate_and_up(worker: int, phase: int, layer: int, step: Step, model: Model) -> None:
    size, outputs = model.sizes.hidden_size, model.sizes.intermediate_size
    own, is_ready, each = own_room(worker, step, model), False, columns_of_piece(outputs, model.sizes.workers)
    y, act = floats(model.room.y), stored(model.room.act, model.like_x)  # [rows, 2, outputs], [rows, outputs]
    for piece in pieces(integers(model.room.counters), phase, step.number, -(-outputs // each)):
        if not is_ready:
            normalize_rows(floats(model.room.x), step.rows, size, layer * 2 + 1, model, own)
            is_ready = True
        start, end = piece * each, min((piece + 1) * each, outputs)
        for first in (0, outputs):
            multiply(GATE_UP, layer, first + start, first + end, own, size, y, 2 * outputs, step, model)
        for row in range(step.rows):
            gate, to = at(y, row * 2 * outputs + start), at(act, row * outputs + start)
            silu_and_mul(gate, at(gate, outputs), end - start, to)


@njit(**OPTIONS)
def project_down(worker: int, phase: int, layer: int, step: Step, model: Model) -> None:
    size, outputs = model.sizes.intermediate_size, model.sizes.hidden_size
    act, each = stored(model.room.act, model.like_x), columns_of_piece(outputs, model.sizes.workers)
    for piece in pieces(integers(model.room.counters), phase, step.number, -(-outputs // each)):
        start, end = piece * each, min((piece + 1) * each, outputs)
        multiply(DOWN, layer, start, end, act, size, floats(model.room.y), outputs, step, model)
        add_to(floats(model.room.x), floats(model.room.y), step.rows, outputs, start, end)


@njit(**OPTIONS)
def compute_logits(worker: int, phase: int, step: Step, model: Model) -> None:
    """Compute the last norm, and the logits of all rows."""
    size, outputs, logits = model.sizes.hidden_size, model.sizes.vocab_size, floats(step.logits)
    own, is_ready, each = own_room(worker, step, model), False, columns_of_piece(outputs, 4 * model.sizes.workers)
    weight, packed, none = model.weights.head, model.weights.packed_head, 0
    for piece in pieces(integers(model.room.counters), phase, step.number, -(-outputs // each)):
        if not is_ready:
            for row in range(step.rows):
                x, to = at(floats(model.room.x), row * size), at(own, row * size)
                normalize(x, floats(model.weights.last_norm), model.eps, size, to)
            is_ready = True
        if piece == 0:
            copy(own, step.rows * size, np.float32(1), stored(step.hidden, model.like))
        start, end = piece * each, min((piece + 1) * each, outputs)
        multiply_by(weight, packed, none, start, end, own, size, logits, outputs, step, model)


@njit(**OPTIONS)
def multiply(
    which: int, layer: int, start: int, end: int, x: Memory, size: int, out: Memory, outputs: int, step: Step,
    model: Model,
) -> None:  # fmt: skip
    """out[row, start .. end - 1] = those rows of a layer's matrix times x[row]. x [rows, size]; out [rows, outputs]"""
    weights, i = model.weights, layer * 4 + which
    weight, packed = get(integers(weights.matrices), i), get(integers(weights.packed), i)
    multiply_by(weight, packed, get(integers(weights.biases), i), start, end, x, size, out, outputs, step, model)


@njit(**OPTIONS)
def multiply_by(
    weight: int, packed: int, bias: int, start: int, end: int, x: Memory, size: int, out: Memory, outputs: int,
    step: Step, model: Model,
) -> None:  # fmt: skip
    """Multiply by the weight as it lies, or by the packed one.

    For few rows it stays as it lies: there is nothing to compute while it is read.
    """
    like = model.like
    if step.rows <= FEW:
        linear(stored(weight, like), stored(bias, like), bias != 0, start, end, x, size, step.rows, out, outputs)
    else:
        terms = stored(bias if bias else model.weights.no_bias, like)
        matmul(x, step.rows, size, stored(packed, like), terms, start, end, outputs, out, outputs)


@njit(**OPTIONS)
def own_room(worker: int, step: Step, model: Model) -> Memory:
    """[rows, max(hidden_size, num_heads * head_dim)] for this worker alone, as x meets the weights"""
    width = max(model.sizes.hidden_size, model.sizes.num_heads * model.shape.head_dim)
    return at(stored(model.room.own, model.like_x), worker * step.rows * width)


@njit(**OPTIONS)
def normalize_rows(x: Memory, rows: int, size: int, which: int, model: Model, out: Memory) -> None:
    """x, out [rows, size]; which: the norm's number"""
    weight = at(floats(model.weights.norms), which * size)
    for row in range(rows):
        normalize(at(x, row * size), weight, model.eps, size, at(out, row * size))


@njit(**OPTIONS)
def add_to(x: Memory, y: Memory, rows: int, size: int, start: int, end: int) -> None:
    """x[row, i] += y[row, i] for i in start .. end - 1"""
    for row in range(rows):
        for i in range(row * size + start, row * size + end):
            write(x, i, read(x, i) + read(y, i))
