"""The attention backend of steps of many rows: plan() works out the jobs of a step once, for all layers."""

from array import array
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..torch.attention import AttentionMetadata
from .attention import PART, PLACES, Pool
from .step_attention import JOB, MERGE, PHASES, SPLIT, TILE, Heads, Plan, Room, attend_step
from .team import STRIDE

if TYPE_CHECKING:
    from ...engine.kv_cache import KVCache


class StepAttention:
    """The attention backend: plan() returns the `attend` of one step."""

    def __init__(self, kv_cache: "KVCache", num_heads: int, cos: Tensor, sin: Tensor, eps: float, workers: int) -> None:
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
        """Clear the blocks that are new in this step. Return its `attend`, for one run of the model."""
        self._kv_cache.clear(step.new_blocks)
        return StepAttend(self, step)

    def room(self, num_rows: int, num_parts: int) -> Room:
        """Return memory for a step: that of earlier steps, if it is large enough."""
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
        """Call attend_step()."""
        at, backend = (qkv.data_ptr(), norms, turns, out.data_ptr()), self._backend
        attend_step(layer, *at, backend.like, backend.shape, backend.heads, self._plan, self._room)


def tables_width(step: AttentionMetadata) -> int:
    return step.block_tables.shape[1]


def jobs_of(step: AttentionMetadata, tile: int) -> tuple[list[int], list[int], int]:
    """Return the numbers of all jobs, most work first; those of all merges; and how many parts there are.

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
    """Return an array of the type by which kernels know a dtype. See vectors.py."""
    return np.empty(0, {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16}[dtype])
