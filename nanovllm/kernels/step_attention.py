"""The attention backend of steps of many rows: rotation, the write to the pool and attention are one call a layer.

    phase      its pieces
    place      rows: queries are rotated and scaled, new keys rotated and written, values written
    attend     jobs x KV heads: a job is a decode, 512 keys of a long one, or some queries of a chunk
    merge      decodes of several parts

plan() works out the jobs once a step; all layers use them.
"""

from array import array
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from ..core.attention import AttentionMetadata
from ..core.kv_cache import KVCache
from .attention import PART, PLACES, Pool, attend, merge
from .norm import normalize
from .rotary import copy, rotate
from .team import STRIDE, open_phases, pieces
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
    """What no step changes; addresses where a name says what is there."""

    workers: int
    num_heads: int
    group: int  # query heads that share a KV head
    pool: int  # KVCache.blocks
    cos: int  # [max_model_len, head_dim], as the model stores them
    sin: int  # [max_model_len, head_dim]
    eps: float  # of norms on heads


class Plan(NamedTuple):
    """What no layer changes: sizes, and addresses of int64."""

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
    layer: int,
    qkv: int,
    norms: int,
    turns: int,
    out: int,
    like: np.ndarray,
    shape: Pool,
    heads: Heads,
    plan: Plan,
    room: Room,
) -> None:
    """qkv [num_rows, num_heads + 2 * num_kv_heads, head_dim] -> out [num_rows, num_heads, head_dim], addresses

    norms: address of float32 [2, head_dim], of q and k; 0: the model has none. turns: 0 if q and k are rotated already.
    like: an array of the type of qkv, out and the pool; shape: the Pool's.
    """
    open_phases(integers(room.counters), PHASES, ONLY)
    for worker in prange(heads.workers):
        work(worker, layer, stored(qkv, like), norms, turns, stored(out, like), like, shape, heads, plan, room)


@njit(**OPTIONS)
def work(
    worker: int,
    layer: int,
    qkv: Memory,
    norms: int,
    turns: int,
    out: Memory,
    like: np.ndarray,
    shape: Pool,
    heads: Heads,
    plan: Plan,
    room: Room,
) -> None:
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
    row: int,
    worker: int,
    layer: int,
    qkv: Memory,
    norms: int,
    turns: int,
    like: np.ndarray,
    shape: Pool,
    heads: Heads,
    plan: Plan,
    room: Room,
) -> None:
    """A new token's queries go to room.q, its keys and values to their slot."""
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
def turn(
    x: Memory,
    norm: int,
    turns: int,
    cos: Memory,
    sin: Memory,
    eps: float,
    scale: float,
    size: int,
    own: Memory,
    out: Memory,
) -> None:
    """A head, normed if the model does that, rotated and scaled. norm: address of float32 [size]"""
    if norm:
        normalize(x, floats(norm), eps, size, own)
        turn_normed(own, turns, cos, sin, scale, size, out)
    else:
        turn_normed(x, turns, cos, sin, scale, size, out)


@njit(**OPTIONS)
def turn_normed(x: Memory, turns: int, cos: Memory, sin: Memory, scale: float, size: int, out: Memory) -> None:
    if turns:
        rotate(x, cos, sin, scale, size, out)
    else:
        copy(x, size, scale, out)


@njit(**OPTIONS)
def attend_job(
    number: int,
    kv: int,
    worker: int,
    layer: int,
    out: Memory,
    like: np.ndarray,
    shape: Pool,
    heads: Heads,
    plan: Plan,
    room: Room,
) -> None:
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


class StepAttention:
    """The backend: plan() makes the `attend` of a step. One object for the life of an engine."""

    def __init__(self, kv_cache: KVCache, num_heads: int, cos: Tensor, sin: Tensor, eps: float, workers: int) -> None:
        """cos, sin [max_model_len, head_dim], of the pool's type; eps: of norms on heads."""
        _, num_layers, _, block_size, num_kv_heads, head_dim = kv_cache.blocks.shape
        self._kv_cache, self._kept = kv_cache, (cos, sin)
        self.dtype = kv_cache.blocks.dtype
        self.like = like_of(self.dtype)
        self.shape = Pool(num_layers, block_size, num_kv_heads, head_dim)
        addresses = kv_cache.blocks.data_ptr(), cos.data_ptr(), sin.data_ptr()
        self.heads = Heads(workers, num_heads, num_heads // num_kv_heads, *addresses, eps)
        rows = max(TILE, self.heads.group) + 1
        self._own = torch.empty(workers, rows, head_dim + 2)
        self._scores = torch.empty(workers, 4 * PART)
        self._places = torch.empty(workers, PLACES, dtype=torch.int64)
        self._counters = torch.empty(PHASES, STRIDE, dtype=torch.int64)
        self._q, self._parts = torch.empty(0), torch.empty(0)

    def plan(self, step: AttentionMetadata) -> "StepAttend":
        """Clear the blocks that are new in this step, then return its `attend`: once for each run of the model."""
        self._kv_cache.clear(step.new_blocks)
        return StepAttend(self, step)

    def room(self, num_rows: int, num_parts: int) -> Room:
        """Memory of earlier steps, if it is large enough."""
        size, heads = self.shape.head_dim, self.heads.num_heads
        if self._q.numel() < num_rows * heads * size:
            self._q = torch.empty(num_rows * heads * size)
        if self._parts.numel() < num_parts * heads * (size + 2):
            self._parts = torch.empty(num_parts * heads * (size + 2))
        out = self._parts.data_ptr()
        peaks = out + 4 * num_parts * heads * size
        own, scores, places = self._own.data_ptr(), self._scores.data_ptr(), self._places.data_ptr()
        addresses = own, scores, places, self._counters.data_ptr()
        return Room(self._q.data_ptr(), out, peaks, peaks + 4 * num_parts * heads, *addresses)


class StepAttend:
    """The `attend` of one step: any mixture of prompts, chunks of prompts and newest tokens."""

    def __init__(self, backend: StepAttention, step: AttentionMetadata) -> None:
        self._backend = backend
        jobs, merges, num_parts = jobs_of(step, max(1, TILE // backend.heads.group))
        positions = [
            position
            for (start, end), context_len in zip(pairwise(step.query_start_loc), step.context_lens, strict=True)
            for position in range(context_len - (end - start), context_len)
        ]
        self.num_rows = len(positions)
        flat = [
            torch.frombuffer(array("q", numbers or [0]), dtype=torch.int64) for numbers in (positions, jobs, merges)
        ]
        self._kept = (*flat, step.slot_mapping, step.block_tables.contiguous())
        where, where_jobs, where_merges, slots, tables = (kept.data_ptr() for kept in self._kept)
        counts = self.num_rows, len(jobs) // JOB, len(merges) // MERGE, num_parts, tables_width(step)
        self._plan = Plan(*counts, where, slots, tables, where_jobs, where_merges)
        self._room = backend.room(self.num_rows, num_parts)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, out [num_tokens, num_heads, head_dim], k, v [num_tokens, num_kv_heads, head_dim], rotated already"""
        assert len(q) == self.num_rows, f"{len(q)} queries, the step has {self.num_rows}"
        out = q.new_empty(q.shape)
        self.attend(layer, torch.cat((q, k, v), dim=1), 0, 0, out)
        return out

    def attend(self, layer: int, qkv: Tensor, norms: int, turns: int, out: Tensor) -> None:
        """See attend_step()."""
        at, backend = (qkv.data_ptr(), norms, turns, out.data_ptr()), self._backend
        attend_step(layer, *at, backend.like, backend.shape, backend.heads, self._plan, self._room)


def tables_width(step: AttentionMetadata) -> int:
    return step.block_tables.shape[1]


def jobs_of(step: AttentionMetadata, tile: int) -> tuple[list[int], list[int], int]:
    """The numbers of all jobs, most work first; those of all merges; and how many parts there are.

    `tile`: queries of a chunk in a job.
    """
    jobs: list[tuple[int, ...]] = []
    merges: list[int] = []
    num_parts = 0
    for seq, (first, end) in enumerate(pairwise(step.query_start_loc)):
        context_len = step.context_lens[seq]
        if end - first > 1 or context_len <= SPLIT:
            position = context_len - (end - first)
            for row in range(first, end, tile):
                queries = min(tile, end - row)
                jobs.append((row, queries, seq, 0, position + row - first + queries, -1))
            continue
        starts = range(0, context_len, SPLIT)
        jobs += [(first, 1, seq, at, min(at + SPLIT, context_len), num_parts + i) for i, at in enumerate(starts)]
        merges += (first, num_parts, len(starts))
        num_parts += len(starts)
    jobs.sort(key=lambda job: -job[1] * (job[4] - job[3]))
    return [number for job in jobs for number in job], merges, num_parts


def like_of(dtype: torch.dtype) -> np.ndarray:
    """An array of the type by which kernels know a dtype. See vectors.py."""
    return np.empty(0, {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16}[dtype])
