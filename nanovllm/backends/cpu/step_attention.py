"""The attention backend of model.py: rotation, writes to the pool and attention are one compiled call per layer.

    phase      its tasks
    store      rows: rotate and scale queries; rotate and write new keys; write values
    attend     jobs x KV heads: a job is a decode, 512 keys of a long decode, or some queries of a chunk
    merge      decodes of several splits

plan() works out the jobs once per step, and all layers share them.
"""

from array import array
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numba import prange
from torch import Tensor

from ..torch.attention import AttentionMetadata
from .attention import PLACES, SPLIT, TILE, Pool, attend, merge
from .elementwise import copy, norm_and_rotate
from .team import STRIDE, open_phases, tasks
from .vectors import Memory, at, floats, get, integers, kernel, like_of, parallel_entry, read, stored

if TYPE_CHECKING:
    from ...engine.kv_cache import KVCache

PHASES = 3
QUERY_TILE = 64  # rows of a chunk, queries x query heads of a KV head, that one job attends for
JOB = 6  # numbers of a job: first row, queries, sequence, first key, end of its keys, split (-1: it has all keys)
MERGE = 3  # numbers of a merge: the row, its first split, and how many
ONLY = 1  # the step's number: all threads of a call end with it, so none can be late


class Setup(NamedTuple):
    """The arguments that are the same in all steps. `pool`, `cos` and `sin` are addresses."""

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
    num_splits: int
    max_blocks: int
    positions: int  # [num_rows]
    slots: int  # [num_rows]
    tables: int  # [num_seqs, max_blocks]
    jobs: int  # [num_jobs, JOB]
    merges: int  # [num_merges, MERGE]


class Buffers(NamedTuple):
    """Addresses of scratch space: float32, except for the last two."""

    q: int  # [num_kv_heads, num_rows, group, head_dim]
    out: int  # [num_kv_heads, num_splits, group, head_dim]
    peaks: int  # [num_kv_heads, num_splits, group]
    sums: int  # [num_kv_heads, num_splits, group]
    scratch: int  # [workers, rows of a job + 1, head_dim + 2]
    scores: int  # [workers, 4 * TILE]
    places: int  # int64 [workers, PLACES]
    counters: int  # int64 [PHASES, STRIDE]


# The kernels


@parallel_entry
def attend_step(
    layer: int, qkv: int, norms: int, rotates: int, out: int, like: np.ndarray, shape: Pool, setup: Setup, plan: Plan,
    work: Buffers,
) -> None:  # fmt: skip
    """Attend from qkv [num_rows, num_heads + 2 * num_kv_heads, head_dim] to out [num_rows, num_heads, head_dim].

    Both are addresses of numbers in the type of `like`, as is the pool of shape `shape`. `norms` is the address of
    float32 [2, head_dim], for q and k, or 0 if the model has none. `rotates` is 0 if q and k are rotated already.
    """
    open_phases(integers(work.counters), PHASES, ONLY)
    for worker in prange(setup.workers):
        run_phases(worker, layer, stored(qkv, like), norms, rotates, stored(out, like), like, shape, setup, plan, work)


@kernel
def run_phases(
    worker: int, layer: int, qkv: Memory, norms: int, rotates: int, out: Memory, like: np.ndarray, shape: Pool,
    setup: Setup, plan: Plan, work: Buffers,
) -> None:  # fmt: skip
    counters, num_kv_heads = integers(work.counters), shape.num_kv_heads
    each = max(1, plan.num_rows // (4 * setup.workers))  # rows
    for task in tasks(counters, 0, ONLY, -(-plan.num_rows // each)):
        for row in range(task * each, min(task * each + each, plan.num_rows)):
            store_row(row, worker, layer, qkv, norms, rotates, like, shape, setup, plan, work)
    for task in tasks(counters, 1, ONLY, plan.num_jobs * num_kv_heads):
        attend_job(task // num_kv_heads, task % num_kv_heads, worker, layer, out, like, shape, setup, plan, work)
    if plan.num_merges:
        for task in tasks(counters, 2, ONLY, plan.num_merges * num_kv_heads):
            merge_job(task // num_kv_heads, task % num_kv_heads, out, shape, setup, plan, work)


@kernel
def scratch_of(worker: int, shape: Pool, setup: Setup, work: Buffers) -> Memory:
    rows = max(QUERY_TILE, setup.group) + 1
    return at(floats(work.scratch), worker * rows * (shape.head_dim + 2))


@kernel
def store_row(
    row: int, worker: int, layer: int, qkv: Memory, norms: int, rotates: int, like: np.ndarray, shape: Pool,
    setup: Setup, plan: Plan, work: Buffers,
) -> None:  # fmt: skip
    """Rotate a new token: its queries go to work.q, its keys and values to their slot."""
    size, group, kvs, slot = shape.head_dim, setup.group, shape.num_kv_heads, get(integers(plan.slots), row)
    position, scratch = get(integers(plan.positions), row), scratch_of(worker, shape, setup, work)
    cos, sin = at(stored(setup.cos, like), position * size), at(stored(setup.sin, like), position * size)
    row_of = at(qkv, row * (setup.num_heads + 2 * kvs) * size)
    scale = np.float32(1) / np.sqrt(np.float32(size))
    for kv in range(kvs):
        to = at(floats(work.q), (kv * plan.num_rows + row) * group * size)
        for g in range(group):
            query = at(row_of, (kv * group + g) * size)
            norm_and_rotate(query, norms, rotates, cos, sin, setup.eps, scale, size, scratch, at(to, g * size))
    layers, block_size = shape.num_layers, shape.block_size
    first = ((slot // block_size * layers + layer) * 2 * block_size + slot % block_size) * kvs * size
    keys = at(stored(setup.pool, like), first)
    key_norm = norms + 4 * size if norms else 0
    for kv in range(kvs):
        key = at(row_of, (setup.num_heads + kv) * size)
        norm_and_rotate(key, key_norm, rotates, cos, sin, setup.eps, np.float32(1), size, scratch, at(keys, kv * size))
    copy(at(row_of, (setup.num_heads + kvs) * size), kvs * size, np.float32(1), at(keys, block_size * kvs * size))


@kernel
def attend_job(
    number: int, kv: int, worker: int, layer: int, out: Memory, like: np.ndarray, shape: Pool, setup: Setup, plan: Plan,
    work: Buffers,
) -> None:  # fmt: skip
    job, size, group = at(integers(plan.jobs), number * JOB), shape.head_dim, setup.group
    row, queries, seq, start, end, split = get(job, 0), get(job, 1), get(job, 2), get(job, 3), get(job, 4), get(job, 5)
    q, table = (
        at(floats(work.q), (kv * plan.num_rows + row) * group * size),
        at(integers(plan.tables), seq * plan.max_blocks),
    )
    scores, places = at(floats(work.scores), worker * 4 * TILE), at(integers(work.places), worker * PLACES)
    rows, position = queries * group, get(integers(plan.positions), row)
    result = scratch_of(worker, shape, setup, work)
    peaks, sums = at(result, rows * size), at(result, rows * (size + 1))
    if split >= 0:
        offset = (kv * plan.num_splits + split) * group
        result, peaks, sums = (
            at(floats(work.out), offset * size),
            at(floats(work.peaks), offset),
            at(floats(work.sums), offset),
        )
    pool = stored(setup.pool, like)
    attend(q, rows, group, position, pool, shape, layer, kv, table, start, end, scores, places, result, peaks, sums)
    if split < 0:
        for r in range(rows):
            to = ((row + r // group) * setup.num_heads + kv * group + r % group) * size
            copy(at(result, r * size), size, np.float32(1) / read(sums, r), at(out, to))


@kernel
def merge_job(number: int, kv: int, out: Memory, shape: Pool, setup: Setup, plan: Plan, work: Buffers) -> None:
    job, size, group = at(integers(plan.merges), number * MERGE), shape.head_dim, setup.group
    offset, to = (kv * plan.num_splits + get(job, 1)) * group, (get(job, 0) * setup.num_heads + kv * group) * size
    result, peaks, sums = (
        at(floats(work.out), offset * size),
        at(floats(work.peaks), offset),
        at(floats(work.sums), offset),
    )
    merge(result, peaks, sums, get(job, 2), group, size, at(out, to))


# The caller


class StepAttention:
    """The attention backend: plan() returns the `attend` of one step."""

    def __init__(self, kv_cache: "KVCache", num_heads: int, cos: Tensor, sin: Tensor, eps: float, workers: int) -> None:
        """Prepare for a model. cos, sin [max_model_len, head_dim] in the pool's type; `eps` is for head norms."""
        _, num_layers, _, block_size, num_kv_heads, head_dim = kv_cache.blocks.shape
        self._kv_cache, self._kept = kv_cache, (cos, sin)
        self.dtype = kv_cache.blocks.dtype
        self.like = like_of(self.dtype)
        self.shape = Pool(num_layers, block_size, num_kv_heads, head_dim)
        addresses = kv_cache.blocks.data_ptr(), cos.data_ptr(), sin.data_ptr()
        self.setup = Setup(workers, num_heads, num_heads // num_kv_heads, *addresses, eps)
        rows = max(QUERY_TILE, self.setup.group) + 1
        self._scratch = torch.empty(workers, rows, head_dim + 2)
        self._scores = torch.empty(workers, 4 * TILE)
        self._places = torch.empty(workers, PLACES, dtype=torch.int64)
        self._counters = torch.empty(PHASES, STRIDE, dtype=torch.int64)
        self._q, self._splits = torch.empty(0), torch.empty(0)

    def plan(self, step: AttentionMetadata) -> "StepAttend":
        """Clear the blocks that are new in `step`, and return an `attend` for one run of the model."""
        self._kv_cache.clear(step.new_blocks)
        return StepAttend(self, step)

    def work(self, num_rows: int, num_splits: int) -> Buffers:
        """Return scratch space for a step, reused from earlier steps if it is large enough."""
        size, heads = self.shape.head_dim, self.setup.num_heads
        if self._q.numel() < num_rows * heads * size:
            self._q = torch.empty(num_rows * heads * size)
        if self._splits.numel() < num_splits * heads * (size + 2):
            self._splits = torch.empty(num_splits * heads * (size + 2))
        out = self._splits.data_ptr()
        peaks = out + 4 * num_splits * heads * size
        scratch, scores, places = self._scratch.data_ptr(), self._scores.data_ptr(), self._places.data_ptr()
        addresses = scratch, scores, places, self._counters.data_ptr()
        return Buffers(self._q.data_ptr(), out, peaks, peaks + 4 * num_splits * heads, *addresses)


class StepAttend:
    """The `attend` of one step, for any mix of prompts, chunks of prompts and decodes."""

    def __init__(self, backend: StepAttention, step: AttentionMetadata) -> None:
        self._backend = backend
        jobs, merges, num_splits = jobs_of(step, max(1, QUERY_TILE // backend.setup.group))
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
        at_positions, at_jobs, at_merges, slots, tables = (kept.data_ptr() for kept in self._kept)
        counts = self.num_rows, len(jobs) // JOB, len(merges) // MERGE, num_splits, step.block_tables.shape[1]
        self._plan = Plan(*counts, at_positions, slots, tables, at_jobs, at_merges)
        self._work = backend.work(self.num_rows, num_splits)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with q and k that are rotated already.

        q, out [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim]
        """
        assert len(q) == self.num_rows, f"the step has {self.num_rows} queries, got {len(q)}"
        out = q.new_empty(q.shape)
        self.attend(layer, torch.cat((q, k, v), dim=1), 0, 0, out)
        return out

    def attend(self, layer: int, qkv: Tensor, norms: int, rotates: int, out: Tensor) -> None:
        """Call attend_step() with the step's plan."""
        at, backend = (qkv.data_ptr(), norms, rotates, out.data_ptr()), self._backend
        attend_step(layer, *at, backend.like, backend.shape, backend.setup, self._plan, self._work)


def jobs_of(step: AttentionMetadata, tile: int) -> tuple[list[int], list[int], int]:
    """Return the numbers of all jobs, longest first, the numbers of all merges, and the number of splits.

    A job of a chunk has up to `tile` queries.
    """
    jobs: list[tuple[int, ...]] = []
    merges: list[int] = []
    num_splits = 0
    for seq, (first, end) in enumerate(pairwise(step.query_start_loc)):
        context_len = step.context_lens[seq]
        if end - first > 1 or context_len <= SPLIT:
            position = context_len - (end - first)
            for row in range(first, end, tile):
                queries = min(tile, end - row)
                jobs.append((row, queries, seq, 0, position + row - first + queries, -1))
            continue
        starts = range(0, context_len, SPLIT)
        jobs += [(first, 1, seq, at, min(at + SPLIT, context_len), num_splits + i) for i, at in enumerate(starts)]
        merges += (first, num_splits, len(starts))
        num_splits += len(starts)
    jobs.sort(key=lambda job: -job[1] * (job[4] - job[3]))
    return [number for job in jobs for number in job], merges, num_splits
