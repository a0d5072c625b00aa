"""The attention backend of steps of many rows: rotation, the write to the pool and attention are one call a layer.

    phase      its pieces
    place      rows: queries are rotated and scaled, new keys rotated and written, values written
    attend     jobs x KV heads: a job is a decode, 512 keys of a long one, or some queries of a chunk
    merge      decodes of several parts

plan() works out the jobs once a step; all layers use them.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from .attention import PART, PLACES, Pool, attend, merge
from .rotary import copy, turn
from .team import open_phases, pieces
from .vectors import (
    ENTRY,
    OPTIONS,
    Memory,
    at,
    floats,
    get,
    integers,
    read,
    stored,
)

PHASES = 3
SPLIT = 512  # keys of a decode that one job attends to
TILE = 64  # rows of a chunk, queries x heads of a group, that one job attends for
JOB = 6  # numbers: its first row, queries, sequence, first key, end of its keys, part (-1: it has all its keys)
ONLY = 1  # the step's number: a call's threads end with it, none comes late
MERGE = 3  # numbers: the row, its first part, how many


class Heads(NamedTuple):
    """Numbers that are the same in all steps, and addresses, named after what they point to."""

    workers: int
    num_heads: int
    group: int  # query heads that share a KV head
    pool: int  # KVCache.blocks
    cos: int  # [max_model_len, head_dim], as the model stores them
    sin: int  # [max_model_len, head_dim]
    eps: float  # of norms on heads


class Plan(NamedTuple):
    """Numbers that are the same in all layers: sizes, and addresses of int64."""

    num_rows: int
    num_jobs: int
    num_merges: int
    num_parts: int
    max_blocks: int
    positions: int  # [num_rows]
    slots: int  # [num_rows]
    tables: int  # [num_seqs, max_blocks]
    jobs: int  # [num_jobs, JOB]
    merges: int  # [num_merges, MERGE]


class Room(NamedTuple):
    """Addresses of what a call works in: float32, but for the last two."""

    q: int  # [num_kv_heads, num_rows, group, head_dim]
    out: int  # [num_kv_heads, num_parts, group, head_dim]
    peaks: int  # [num_kv_heads, num_parts, group]
    sums: int  # [num_kv_heads, num_parts, group]
    own: int  # [workers, rows of a job + 1, head_dim + 2]
    scores: int  # [workers, 4 * PART]
    places: int  # int64 [workers, PLACES]
    counters: int  # int64 [PHASES, STRIDE]


@njit(parallel=True, **ENTRY)
def attend_step(
    layer: int, qkv: int, norms: int, turns: int, out: int, like: np.ndarray, shape: Pool, heads: Heads, plan: Plan,
    room: Room,
) -> None:  # fmt: skip
    """qkv [num_rows, num_heads + 2 * num_kv_heads, head_dim] -> out [num_rows, num_heads, head_dim], addresses

    norms: address of float32 [2, head_dim], of q and k; 0: the model has none. turns: 0 if q and k are rotated already.
    like: an array of the type of qkv, out and the pool; shape: the Pool's.
    """
    open_phases(integers(room.counters), PHASES, ONLY)
    for worker in prange(heads.workers):
        work(worker, layer, stored(qkv, like), norms, turns, stored(out, like), like, shape, heads, plan, room)


@njit(**OPTIONS)
def work(
    worker: int, layer: int, qkv: Memory, norms: int, turns: int, out: Memory, like: np.ndarray, shape: Pool,
    heads: Heads, plan: Plan, room: Room,
) -> None:  # fmt: skip
    counters, num_kv_heads = integers(room.counters), shape.num_kv_heads
    each = max(1, plan.num_rows // (4 * heads.workers))  # rows
    for piece in pieces(counters, 0, ONLY, -(-plan.num_rows // each)):
        for row in range(piece * each, min(piece * each + each, plan.num_rows)):
            place_row(row, worker, layer, qkv, norms, turns, like, shape, heads, plan, room)
    for piece in pieces(counters, 1, ONLY, plan.num_jobs * num_kv_heads):
        attend_job(piece // num_kv_heads, piece % num_kv_heads, worker, layer, out, like, shape, heads, plan, room)
    if plan.num_merges:
        for piece in pieces(counters, 2, ONLY, plan.num_merges * num_kv_heads):
            merge_job(piece // num_kv_heads, piece % num_kv_heads, out, shape, heads, plan, room)


@njit(**OPTIONS)
def own_room(worker: int, shape: Pool, heads: Heads, room: Room) -> Memory:
    rows = max(TILE, heads.group) + 1
    return at(floats(room.own), worker * rows * (shape.head_dim + 2))


@njit(**OPTIONS)
def place_row(
    row: int, worker: int, layer: int, qkv: Memory, norms: int, turns: int, like: np.ndarray, shape: Pool, heads: Heads,
    plan: Plan, room: Room,
) -> None:  # fmt: skip
    """Rotate a new token: its queries go to room.q, its keys and values to their slot."""
    size, group, kvs, slot = shape.head_dim, heads.group, shape.num_kv_heads, get(integers(plan.slots), row)
    position, own = get(integers(plan.positions), row), own_room(worker, shape, heads, room)
    cos, sin = at(stored(heads.cos, like), position * size), at(stored(heads.sin, like), position * size)
    row_of = at(qkv, row * (heads.num_heads + 2 * kvs) * size)
    scale = np.float32(1) / np.sqrt(np.float32(size))
    for kv in range(kvs):
        to = at(floats(room.q), (kv * plan.num_rows + row) * group * size)
        for g in range(group):
            query = at(row_of, (kv * group + g) * size)
            turn(query, norms, turns, cos, sin, heads.eps, scale, size, own, at(to, g * size))
    layers, block_size = shape.num_layers, shape.block_size
    first = ((slot // block_size * layers + layer) * 2 * block_size + slot % block_size) * kvs * size
    keys = at(stored(heads.pool, like), first)
    key_norm = norms + 4 * size if norms else 0
    for kv in range(kvs):
        key = at(row_of, (heads.num_heads + kv) * size)
        turn(key, key_norm, turns, cos, sin, heads.eps, np.float32(1), size, own, at(keys, kv * size))
    copy(at(row_of, (heads.num_heads + kvs) * size), kvs * size, np.float32(1), at(keys, block_size * kvs * size))


@njit(**OPTIONS)
def attend_job(
    number: int, kv: int, worker: int, layer: int, out: Memory, like: np.ndarray, shape: Pool, heads: Heads, plan: Plan,
    room: Room,
) -> None:  # fmt: skip
    job, size, group = at(integers(plan.jobs), number * JOB), shape.head_dim, heads.group
    row, queries, seq, start, end, part = get(job, 0), get(job, 1), get(job, 2), get(job, 3), get(job, 4), get(job, 5)
    q, table = (
        at(floats(room.q), (kv * plan.num_rows + row) * group * size),
        at(integers(plan.tables), seq * plan.max_blocks),
    )
    scores, places = at(floats(room.scores), worker * 4 * PART), at(integers(room.places), worker * PLACES)
    rows, position = queries * group, get(integers(plan.positions), row)
    found = own_room(worker, shape, heads, room)
    peaks, sums = at(found, rows * size), at(found, rows * (size + 1))
    if part >= 0:
        where = (kv * plan.num_parts + part) * group
        found, peaks, sums = (
            at(floats(room.out), where * size),
            at(floats(room.peaks), where),
            at(floats(room.sums), where),
        )
    pool = stored(heads.pool, like)
    attend(q, rows, group, position, pool, shape, layer, kv, table, start, end, scores, places, found, peaks, sums)
    if part < 0:
        for r in range(rows):
            to = ((row + r // group) * heads.num_heads + kv * group + r % group) * size
            copy(at(found, r * size), size, np.float32(1) / read(sums, r), at(out, to))


@njit(**OPTIONS)
def merge_job(number: int, kv: int, out: Memory, shape: Pool, heads: Heads, plan: Plan, room: Room) -> None:
    job, size, group = at(integers(plan.merges), number * MERGE), shape.head_dim, heads.group
    where, to = (kv * plan.num_parts + get(job, 1)) * group, (get(job, 0) * heads.num_heads + kv * group) * size
    found, peaks, sums = at(floats(room.out), where * size), at(floats(room.peaks), where), at(floats(room.sums), where)
    merge(found, peaks, sums, get(job, 2), group, size, at(out, to))
