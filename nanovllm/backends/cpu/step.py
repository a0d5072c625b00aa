"""A step of any mix of prompts, chunks of prompts and decodes, as one compiled call for all layers.

The calling thread is worker 0. Helpers run the same function, and join a step when they see it in the mailbox
(team.py). All workers go through the phases together, and the next free worker takes the next task of a phase:

    phase of a layer   tasks                                 each worker first computes
    qkv                rows x outputs of the weight          norm
    store              rows of chunks                        -
    attend             jobs x KV heads (runner.py)           -
    merge              decodes with several splits           -
    output             rows x outputs of the weight          -
    gate and up        rows x outputs of both weights        norm
    down               rows x outputs of the weight          -

After the layers come the last norm, the logits, and the likeliest token of each row. A phase without tasks costs
nothing. Each worker recomputes the norm of a few rows, because waiting for another worker would cost more. A task has
at most 128 rows, which stay in the core's cache while the weight is read.

With several ranks, each call runs half a layer, its attention or its MLP, and the ranks add up the outputs in between.
"""

from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ...quantization import GROUP
from .attention import attend, join, merge, slot
from .dot import depth_of
from .elementwise import copy, norm_and_rotate, rms_norm, silu_and_mul
from .int8_attention import attend_int8, scratch_of, store_int8
from .layout import (
    CHUNK,
    COLUMNS,
    DOWN,
    GATE,
    JOB,
    LAST_PHASES,
    MATRICES,
    MATRIX,
    MERGE,
    OUT,
    PART,
    PHASES,
    PLACES,
    SPLIT,
    SUMS,
    UP,
    Int8Pool,
    K,
    Pool,
    Q,
    Sizes,
    Step,
    V,
    Weights,
    Workspace,
)
from .likeliest import join_parts, peak_of
from .matmul import ROWS, matmul, packed_place
from .quantized import octets, quantize_rows, quantized_matmul, quantized_number
from .team import open_phases, store_release, tasks, wait_for_step
from .vectors import (
    Memory,
    as_type,
    at,
    choose,
    fields_at,
    floats,
    get,
    integers,
    kernel,
    part,
    put,
    read,
    stored,
    write,
)


class Model(NamedTuple):
    """The types, numbers and addresses that are the same in all steps."""

    like: Memory  # nowhere: a pointer to the type of weights, hidden, and keys and values unless they are int8
    like_x: Memory  # nowhere: a pointer to the type of x for weights, see layout.type_of()
    shape: Pool | Int8Pool
    sizes: Sizes
    weights: Weights
    work: Workspace
    eps: np.float32


class Buffers(NamedTuple):
    """Addresses in the scratch space of a step. All numbers are float32 unless a comment gives another type."""

    x: int  # [rows, hidden_size], the residual
    qkv: int  # [rows, num_heads + 2 * num_kv_heads, head_dim]
    attended: int  # [rows, num_heads, head_dim], in the type of like_x
    act: int  # [rows, intermediate_size], in the type of like_x
    out: int  # [num_kv_heads, num_splits, group, head_dim]
    peaks: int  # [num_kv_heads, num_splits, group]
    sums: int  # [num_kv_heads, num_splits, group]


@kernel
def buffers_of(step: Step, sizes: Sizes, shape: Pool | Int8Pool) -> Buffers:
    """Divide the step's scratch space into buffers. StepRunner.run() computes its size."""
    heads = sizes.num_heads * shape.head_dim
    qkv = step.work + 4 * step.rows * sizes.hidden_size
    attended = qkv + 4 * step.rows * (heads + 2 * shape.num_kv_heads * shape.head_dim)
    act = attended + 4 * step.rows * heads
    out = act + 4 * step.rows * sizes.intermediate_size
    peaks = out + 4 * step.num_splits * heads
    return Buffers(step.work, qkv, attended, act, out, peaks, peaks + 4 * step.num_splits * sizes.num_heads)


# The step


step_at, sizes_at, weights_at, work_at = map(fields_at, (Step, Sizes, Weights, Workspace))


@cache
def step_for(pool: Any) -> Callable[..., Any]:
    """Return the function that the loader calls, for keys and values in a Pool or an Int8Pool."""
    pool_at = fields_at(pool)
    first_size, first_weight, first_buffer = accumulate(len(each._fields) for each in (pool, Sizes, Weights))

    @kernel
    def run_step(worker: int, seen: int, step: int, model: int, like: Memory, like_x: Memory) -> int:
        """Run a step as worker 0. As a helper, take part in all steps after `seen` until none comes for a while.

        Return the number of the last step seen. `step` is the address of a Step, and `model` that of a pool, Sizes,
        Weights and a Workspace in a row.
        """
        numbers = integers(model)
        shape, sizes = pool_at(numbers), sizes_at(at(numbers, first_size))
        weights, work = weights_at(at(numbers, first_weight)), work_at(at(numbers, first_buffer))
        fixed = Model(like, like_x, shape, sizes, weights, work, read(floats(weights.eps), 0))
        mailbox, counters = integers(work.mailbox), integers(work.counters)
        if worker == 0:
            new = step_at(integers(step))
            open_phases(counters, shape.num_layers * PHASES + LAST_PHASES, new.number)
            if new.token_ids:
                embed(new, fixed)
            post_step(new, mailbox)
        while True:
            if wait_for_step(mailbox, seen) == seen:
                return seen
            newest = step_at(mailbox)  # a later one will offer no task to a helper that reads while it is written
            seen = newest.number
            run_phases(worker, newest, fixed)
            if worker == 0:
                return seen

    return run_step


@part
def run_phases(worker: int, step: Step, model: Model) -> None:
    last = model.shape.num_layers * PHASES
    if step.rows:
        work = buffers_of(step, model.sizes, model.shape)
        for half in range(step.first_half, step.end_half):
            layer, phase = half // 2, half // 2 * PHASES
            if half % 2 == 0:
                project_qkv(worker, phase, layer, step, work, model)
                store_chunks(worker, phase + 1, layer, step, work, model)
                attend_all(worker, phase + 2, layer, step, work, model)
                merge_all(phase + 3, step, work, model)
                project_out(worker, phase + 4, layer, step, work, model)
            else:
                gate_and_up(worker, phase + 5, layer, step, work, model)
                project_down(worker, phase + 6, layer, step, work, model)
        if step.hidden:
            norm_last(last, step, work, model)
    if step.logits and step.hidden:
        compute_logits(worker, last + 1, step, model)
    if step.tokens:
        find_peaks(worker, last + 2, step, model)


@part
def embed(step: Step, model: Model) -> None:
    """Set x [rows, hidden_size] to each token's embedding, or to zeros for a token of another rank."""
    size, vocab_size, x = model.sizes.hidden_size, model.weights.vocab_size, floats(step.work)
    head = matrix(model.shape.num_layers * MATRICES, model)
    embedding = stored(model.weights.embedding if model.weights.embedding else get(head, 0), model.like)
    depth, format = depth_of(stored(0, model.like_x), embedding), get(head, 3)
    for m in range(step.rows):
        token_id = get(integers(step.token_ids), m) - model.weights.first_token
        if token_id < 0 or token_id >= vocab_size:
            for i in range(size):
                write(x, m * size + i, np.float32(0))
        elif model.weights.embedding:
            copy(at(embedding, token_id * size), size, np.float32(1), at(x, m * size))
        elif format:
            for i in range(size):
                write(x, m * size + i, quantized_number(get(head, 0), get(head, 1), token_id, i, size, format))
        else:
            for i in range(size):
                write(x, m * size + i, read(embedding, packed_place(token_id, i, vocab_size, size, depth)))


@part
def post_step(step: Step, mailbox: Memory) -> None:
    """Put a step into the mailbox.

    The phases must be open before any field is visible. The step's number is written last, so a worker that sees the
    number sees all other fields, too.
    """
    for i in range(1, len(step)):
        store_release(mailbox, i, step[i])
    store_release(mailbox, 0, step.number)


# Splitting a phase into tasks


class Grid(NamedTuple):
    """Tasks of a matmul: chunks of rows times ranges of outputs."""

    chunk: int  # rows per chunk
    each: int  # outputs per range, a multiple of COLUMNS
    ranges: int  # of outputs
    tasks: int


@kernel
def grid_of(rows: int, outputs: int, workers: int, per_worker: int) -> Grid:
    """Return a grid of chunks of nearly equal size, with about `per_worker` tasks for each worker."""
    chunks = -(-rows // CHUNK)
    chunk = -(-rows // (chunks * ROWS)) * ROWS
    chunks = -(-rows // chunk)
    each = -(-outputs // (max(1, per_worker * workers // chunks) * COLUMNS)) * COLUMNS
    ranges = -(-outputs // each)
    return Grid(chunk, each, ranges, chunks * ranges)


@kernel
def part_of(task: int, grid: Grid, rows: int, outputs: int) -> tuple[int, int, int, int]:
    """Return a task's first row, its number of rows, its first output, and the end of its outputs."""
    first, start = task // grid.ranges * grid.chunk, task % grid.ranges * grid.each
    return first, min(grid.chunk, rows - first), start, min(start + grid.each, outputs)


@kernel
def share_of(rows: int, model: Model) -> int:
    """Return the rows per task in a phase without a weight, for about four tasks per worker."""
    return max(1, rows // (4 * model.sizes.workers))


def is_int8(shape: Any) -> bool:
    """Return True if `shape`, a Numba type, describes an int8 pool."""
    return bool(shape.instance_class is Int8Pool)


# The phases of a layer


@part
def project_qkv(worker: int, phase: int, layer: int, step: Step, work: Buffers, model: Model) -> None:
    size = model.sizes.hidden_size
    outputs = (model.sizes.num_heads + 2 * model.shape.num_kv_heads) * model.shape.head_dim
    number, x, ready = layer * MATRICES, normed_of(worker, model), -1
    grid = grid_of(step.rows, outputs, model.sizes.workers, 4)
    for task in tasks(integers(model.work.counters), phase, step.number, grid.tasks):
        first, rows, start, end = part_of(task, grid, step.rows, outputs)
        if first != ready:
            norm_rows(at(floats(work.x), first * size), rows, layer * 2, x, model)
            prepare(worker, number + Q, x, rows, size, model)
            ready = first
        out, offset = at(floats(work.qkv), first * outputs), 0
        for which in (Q, K, V):
            own = get(matrix(number + which, model), 4)
            low, high = max(0, start - offset), min(own, end - offset)
            if low < high:
                part = at(out, offset)
                multiply(worker, number + which, low, high, x, size, rows, part, outputs, own, False, model)
            offset += own


@part
def store_chunks(worker: int, phase: int, layer: int, step: Step, work: Buffers, model: Model) -> None:
    """Write the keys and values of chunks before attention, because the jobs of a chunk read each other's."""
    each = share_of(step.rows, model)
    for task in tasks(integers(model.work.counters), phase, step.number, -(-step.stored_rows // each)):
        for row in range(task * each, min(task * each + each, step.rows)):
            place = get(integers(step.slots), row)
            if place >= 0:
                block, offset = place // model.shape.block_size, place % model.shape.block_size
                for kv in range(model.shape.num_kv_heads):
                    write_key_and_value(worker, layer, row, kv, block, offset, step, work, model)


@part
def attend_all(worker: int, phase: int, layer: int, step: Step, work: Buffers, model: Model) -> None:
    num_kv_heads = model.shape.num_kv_heads
    for task in tasks(integers(model.work.counters), phase, step.number, step.num_jobs * num_kv_heads):
        attend_job(worker, layer, task % step.num_jobs, task // step.num_jobs, step, work, model)


@part
def attend_job(worker: int, layer: int, number: int, kv: int, step: Step, work: Buffers, model: Model) -> None:
    """Attend with the query heads that share a KV head, of one or several queries, to SPLIT keys at a time."""
    job, shape, group, size = (
        at(integers(step.jobs), number * JOB),
        model.shape,
        model.sizes.group,
        model.shape.head_dim,
    )
    row, queries, seq, start, end, split = get(job, 0), get(job, 1), get(job, 2), get(job, 3), get(job, 4), get(job, 5)
    rows, table = queries * group, at(integers(step.tables), seq * step.max_blocks)
    position, to = get(integers(step.positions), row), row * model.sizes.num_heads + kv * group
    if get(job, 6):
        block = get(table, position // shape.block_size)
        write_key_and_value(worker, layer, row, kv, block, position % shape.block_size, step, work, model)
    heads, sizes = heads_of(worker, model), model.sizes
    q = queries_of(shape, heads, model)
    for r in range(rows):
        query, scale = row + r // group, np.float32(1) / np.sqrt(np.float32(size))
        rotate_head(worker, layer, query, kv * group + r % group, 0, scale, at(q, r * size), step, work, model)
    result, more = at(heads, sizes.job_rows * size), at(heads, 2 * sizes.job_rows * size)
    peaks = at(floats(model.work.peaks), worker * 4 * sizes.job_rows)
    sums, more_peaks = at(peaks, sizes.job_rows), at(peaks, 2 * sizes.job_rows)
    more_sums = at(more_peaks, sizes.job_rows)
    if split >= 0:
        i = (kv * step.num_splits + split) * group
        result, peaks, sums = at(floats(work.out), i * size), at(floats(work.peaks), i), at(floats(work.sums), i)
    for first in range(start, end, SPLIT):
        is_first, last = first == start, min(first + SPLIT, end)
        out, tops, totals = (result, peaks, sums) if is_first else (more, more_peaks, more_sums)
        early = max(0, first - position)  # queries that see none of these keys
        r = early * group
        attend_keys(
            shape, at(q, r * size), rows - r, position + early, layer, kv, table, first, last, out, tops, totals,
            worker, model,
        )  # fmt: skip
        if not is_first:
            join(at(result, r * size), at(peaks, r), at(sums, r), out, tops, totals, rows - r, size)
    if split < 0:
        for r in range(rows):
            place = (to + r // group * sizes.num_heads + r % group) * size
            attended = at(stored(work.attended, model.like_x), place)
            copy(at(result, r * size), size, np.float32(1) / read(sums, r), attended)


def attend_floats(
    shape: Pool, q: Memory, rows: int, first: int, layer: int, kv: int, table: Memory, start: int, end: int,
    out: Memory, peaks: Memory, sums: Memory, worker: int, model: Model,
) -> None:  # fmt: skip
    pool, group, work = stored(model.weights.pool, model.like), model.sizes.group, model.work
    scratch, places = at(floats(work.scratch), worker * model.sizes.scratch), at(integers(work.places), worker * PLACES)
    attend(q, rows, group, first, pool, shape, layer, kv, table, start, end, scratch, places, out, peaks, sums)


def attend_integers(
    shape: Int8Pool, q: Memory, rows: int, first: int, layer: int, kv: int, table: Memory, start: int, end: int,
    out: Memory, peaks: Memory, sums: Memory, worker: int, model: Model,
) -> None:  # fmt: skip
    pool, sizes, work = model.weights.pool, model.sizes, model.work
    scratch = scratch_of(work.scratch + 4 * worker * sizes.scratch, sizes.job_rows)
    places = at(integers(work.places), worker * PLACES)
    attend_int8(
        q, rows, sizes.group, first, pool, shape, layer, kv, table, start, end, scratch, places, out, peaks, sums
    )


attend_keys = choose(attend_floats, lambda shape: attend_integers if is_int8(shape) else attend_floats)


def as_multiplied(shape: Pool, q: Memory, model: Model) -> Memory:
    return as_type(q, stored(0, model.like_x))  # the type that is multiplied fastest


def as_float32(shape: Int8Pool, q: Memory, model: Model) -> Memory:
    return q


queries_of = choose(as_multiplied, lambda shape: as_float32 if is_int8(shape) else as_multiplied)


@part
def merge_all(phase: int, step: Step, work: Buffers, model: Model) -> None:
    """Merge the splits of decodes."""
    kvs, group, size = model.shape.num_kv_heads, model.sizes.group, model.shape.head_dim
    for task in tasks(integers(model.work.counters), phase, step.number, step.num_merges * kvs):
        numbers, kv = at(integers(step.merges), task // kvs * MERGE), task % kvs
        i, to = (kv * step.num_splits + get(numbers, 1)) * group, get(numbers, 0) * model.sizes.num_heads + kv * group
        out, peaks, sums = at(floats(work.out), i * size), at(floats(work.peaks), i), at(floats(work.sums), i)
        merge(out, peaks, sums, get(numbers, 2), group, size, at(stored(work.attended, model.like_x), to * size))


@part
def project_out(worker: int, phase: int, layer: int, step: Step, work: Buffers, model: Model) -> None:
    size = model.sizes.num_heads * model.shape.head_dim
    add_product(worker, phase, layer * MATRICES + OUT, stored(work.attended, model.like_x), size, step, work, model)


@part
def project_down(worker: int, phase: int, layer: int, step: Step, work: Buffers, model: Model) -> None:
    size = model.sizes.intermediate_size
    add_product(worker, phase, layer * MATRICES + DOWN, stored(work.act, model.like_x), size, step, work, model)


@kernel
def add_product(
    worker: int, phase: int, number: int, inputs: Memory, size: int, step: Step, work: Buffers, model: Model
) -> None:
    """Add `inputs` [rows, size] times a matrix to the step's target."""
    outputs, ready = model.sizes.hidden_size, -1
    grid = grid_of(step.rows, outputs, model.sizes.workers, 4)
    for task in tasks(integers(model.work.counters), phase, step.number, grid.tasks):
        first, rows, start, end = part_of(task, grid, step.rows, outputs)
        x, out = at(inputs, first * size), at(floats(step.target), first * outputs)
        if first != ready:
            prepare(worker, number, x, rows, size, model)
            ready = first
        multiply(worker, number, start, end, x, size, rows, out, outputs, outputs, True, model)


@part
def gate_and_up(worker: int, phase: int, layer: int, step: Step, work: Buffers, model: Model) -> None:
    size, outputs = model.sizes.hidden_size, model.sizes.intermediate_size
    normed, tile = normed_of(worker, model), at(floats(model.work.tile), worker * CHUNK * 2 * COLUMNS)
    grid, ready = grid_of(step.rows, outputs, model.sizes.workers, 4), -1
    for task in tasks(integers(model.work.counters), phase, step.number, grid.tasks):
        first, rows, start, end = part_of(task, grid, step.rows, outputs)
        if first != ready:
            norm_rows(at(floats(work.x), first * size), rows, layer * 2 + 1, normed, model)
            prepare(worker, layer * MATRICES + GATE, normed, rows, size, model)
            ready = first
        for r in range(start, end, COLUMNS):
            until = min(r + COLUMNS, end)
            for which in (GATE, UP):
                out = at(tile, (which - GATE) * COLUMNS - r)
                number = layer * MATRICES + which
                multiply(worker, number, r, until, normed, size, rows, out, 2 * COLUMNS, outputs, False, model)
            for m in range(rows):
                gate, act = at(tile, m * 2 * COLUMNS), at(stored(work.act, model.like_x), (first + m) * outputs + r)
                silu_and_mul(gate, at(gate, COLUMNS), until - r, act)


@kernel
def matrix(number: int, model: Model) -> Memory:
    """Return the MATRIX numbers of a matrix."""
    return at(integers(model.weights.matrices), number * MATRIX)


@kernel
def prepare(worker: int, number: int, x: Memory, rows: int, size: int, model: Model) -> None:
    """Quantize x [rows, size] for multiply(), if the matrix is quantized."""
    if get(matrix(number, model), 3):
        values, scales, sums = quantized_of(worker, model)
        quantize_rows(x, rows, size, values, scales, sums)


@kernel
def quantized_of(worker: int, model: Model) -> tuple[Memory, Memory, Memory]:
    """Return the worker's quantized x, its scales and its sums."""
    i, groups, work = worker * CHUNK * model.sizes.widest, worker * CHUNK * model.sizes.widest // GROUP, model.work
    return at(octets(work.values), i), at(floats(work.scales), groups), at(floats(work.sums), groups * SUMS)


@kernel
def multiply(
    worker: int, number: int, start: int, end: int, x: Memory, size: int, rows: int, out: Memory, stride: int,
    outputs: int, adds: bool, model: Model,
) -> None:  # fmt: skip
    """Set out[row, start .. end - 1] to x[row] times these outputs of a matrix, or add to it. Call prepare() first.

    x [rows, size]; out [rows, stride]; the matrix [outputs, size]
    """
    fields = matrix(number, model)
    weight, bias, format = get(fields, 0), stored(get(fields, 2), model.like), get(fields, 3)
    if format:
        values, scales, sums = quantized_of(worker, model)
        of_weight, tile = floats(get(fields, 1)), at(floats(model.work.tile), worker * CHUNK * 2 * COLUMNS)
        quantized_matmul(
            values, scales, sums, rows, size, octets(weight), of_weight, format, bias, start, end, outputs, out, stride,
            adds, tile,
        )  # fmt: skip
    else:
        matmul(x, rows, size, stored(weight, model.like), bias, start, end, outputs, out, stride, adds)


@kernel
def norm_rows(x: Memory, rows: int, which: int, out: Memory, model: Model) -> None:
    """Normalize x [rows, hidden_size] into out, with norm number `which` of the model."""
    size = model.sizes.hidden_size
    weight = at(floats(model.weights.norms), which * size)
    for row in range(rows):
        rms_norm(at(x, row * size), weight, model.eps, size, at(out, row * size))


@kernel
def normed_of(worker: int, model: Model) -> Memory:
    """Return the worker's buffer of normalized rows, [CHUNK, hidden_size] in the type of like_x."""
    return at(stored(model.work.normed, model.like_x), worker * CHUNK * model.sizes.hidden_size)


@kernel
def heads_of(worker: int, model: Model) -> Memory:
    """Return the worker's [3 * job_rows + 1, head_dim]: rotated queries, results, results of a part, and one head."""
    return at(floats(model.work.heads), worker * (3 * model.sizes.job_rows + 1) * model.shape.head_dim)


@kernel
def write_key_and_value(
    worker: int, layer: int, row: int, kv: int, block: int, offset: int, step: Step, work: Buffers, model: Model
) -> None:
    """Write a new token's key and value to its slot."""
    value = head_of(row, model.sizes.num_heads + model.shape.num_kv_heads + kv, work, model)
    write_slot(model.shape, worker, layer, row, kv, block, offset, value, step, work, model)


def write_floats(
    shape: Pool, worker: int, layer: int, row: int, kv: int, block: int, offset: int, value: Memory, step: Step,
    work: Buffers, model: Model,
) -> None:  # fmt: skip
    key = at(stored(model.weights.pool, model.like), slot(shape, layer, kv, block, offset))
    rotate_head(worker, layer, row, model.sizes.num_heads + kv, 1, np.float32(1), key, step, work, model)
    copy(value, shape.head_dim, np.float32(1), at(key, shape.block_size * shape.num_kv_heads * shape.head_dim))


def write_int8(
    shape: Int8Pool, worker: int, layer: int, row: int, kv: int, block: int, offset: int, value: Memory, step: Step,
    work: Buffers, model: Model,
) -> None:  # fmt: skip
    pool, scratch = model.weights.pool, model.work.scratch + 4 * worker * model.sizes.scratch
    key = floats(scratch + shape.head_dim)
    rotate_head(worker, layer, row, model.sizes.num_heads + kv, 1, np.float32(1), key, step, work, model)
    store_int8(shape, pool, layer, kv, block, offset, 0, key, scratch)
    store_int8(shape, pool, layer, kv, block, offset, 1, value, scratch)


write_slot = choose(write_floats, lambda shape: write_int8 if is_int8(shape) else write_floats)


@kernel
def rotate_head(
    worker: int, layer: int, row: int, head: int, which: int, scale: float, out: Memory, step: Step, work: Buffers,
    model: Model,
) -> None:  # fmt: skip
    """Normalize and rotate a head: of a query if `which` is 0, of a key if it is 1."""
    weights, size, like = model.weights, model.shape.head_dim, model.like
    position = get(integers(step.positions), row)
    cos, sin = at(stored(weights.cos, like), position * size), at(stored(weights.sin, like), position * size)
    norm = weights.head_norms + 4 * (layer * 2 + which) * size if weights.head_norms else 0
    scratch = at(heads_of(worker, model), 3 * model.sizes.job_rows * size)
    norm_and_rotate(head_of(row, head, work, model), norm, cos, sin, model.eps, scale, size, scratch, out)


@kernel
def head_of(row: int, head: int, work: Buffers, model: Model) -> Memory:
    heads = model.sizes.num_heads + 2 * model.shape.num_kv_heads
    return at(floats(work.qkv), (row * heads + head) * model.shape.head_dim)


# After the layers


@part
def norm_last(phase: int, step: Step, work: Buffers, model: Model) -> None:
    """Set `hidden` to the rows of x, normalized by the last norm."""
    size, each = model.sizes.hidden_size, share_of(step.rows, model)
    hidden = stored(step.hidden, model.like)
    for task in tasks(integers(model.work.counters), phase, step.number, -(-step.rows // each)):
        for row in range(task * each, min(task * each + each, step.rows)):
            x = at(floats(work.x), row * size)
            rms_norm(x, floats(model.weights.last_norm), model.eps, size, at(hidden, row * size))


@part
def compute_logits(worker: int, phase: int, step: Step, model: Model) -> None:
    """Compute the logits of some rows of `hidden`."""
    size, outputs, logits = model.sizes.hidden_size, step.vocab_size, floats(step.logits)
    number, hidden, x = model.shape.num_layers * MATRICES, stored(step.hidden, model.like), normed_of(worker, model)
    grid, ready = grid_of(step.num_outputs, outputs, model.sizes.workers, 16), -1
    for task in tasks(integers(model.work.counters), phase, step.number, grid.tasks):
        first, rows, start, end = part_of(task, grid, step.num_outputs, outputs)
        if first != ready:
            for m in range(rows):
                row = get(integers(step.outputs), first + m)
                copy(at(hidden, row * size), size, np.float32(1), at(x, m * size))
            prepare(worker, number, x, rows, size, model)
            ready = first
        out = at(logits, first * outputs)
        multiply(worker, number, start, end, x, size, rows, out, outputs, outputs, False, model)


@part
def find_peaks(worker: int, phase: int, step: Step, model: Model) -> None:
    """Find the likeliest token of each row of the logits, and its log-probability."""
    parts = -(-step.vocab_size // PART)
    count = step.num_outputs * parts
    tokens, peaks, sums = integers(step.work), floats(step.work + 8 * count), floats(step.work + 12 * count)
    for task in tasks(integers(model.work.counters), phase, step.number, count):
        start = task % parts * PART
        row = at(floats(step.logits), task // parts * step.vocab_size + start)
        token, peak, total = peak_of(row, min(PART, step.vocab_size - start))
        put(tokens, task, start + token)
        write(peaks, task, peak)
        write(sums, task, total)
    if worker == 0:
        join_parts(tokens, peaks, sums, step.num_outputs, parts, integers(step.tokens), floats(step.logprobs))
