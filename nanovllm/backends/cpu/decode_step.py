"""A decode step of at most 64 sequences, as one compiled call for all layers.

With so few rows, a step is one pass over the weights. Calling a framework's operations one by one costs more than the
work they do, and its threads wait for each other after every operation. Here each step reads the weights and the cached
keys in place, once. The calling thread is worker 0. Helpers run the same function, and join a step when they see it in
the mailbox (team.py). All workers go through the phases together, and the tasks of a phase go to whichever worker is
free:

    phase of a layer   tasks                          first, by each worker that gets a task
    qkv                outputs of the weight          norm
    attention          sequence x KV head x split     rotate the heads; write the new key and value
    output             outputs of the weight          merge the splits
    gate and up        outputs of both weights        norm
    down               outputs of the weight          -

After the layers come the last norm and the logits, whose tasks are outputs of the head. The work in the last column is
small, so it is cheaper for each worker to repeat it than to wait for another worker.
"""

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...llama import LlamaForCausalLM
from .attention import PLACES, SPLIT, TILE, Pool, attend, merge, slot
from .dot import depth_of
from .elementwise import copy, norm_and_rotate, rms_norm, silu_and_mul_row
from .matmul import FEW_ROWS, PackedLinear, linear, matmul, outputs_per_task, packed_place, type_of
from .team import STRIDE, Helpers, load_acquire, open_phases, store_release, tasks, wait_for_step
from .vectors import Memory, at, entry, floats, get, integers, kernel, like_of, read, stored, write

if TYPE_CHECKING:
    from ...engine.kv_cache import KVCache

PHASES = 5  # of a layer
QKV, OUT, GATE_UP, DOWN = range(4)
MAX_ROWS = 64  # sequences, if weights are packed; otherwise FEW_ROWS

# The arguments, as addresses and sizes


class Step(NamedTuple):
    """One step. Every field that is not a number or a size is an address."""

    number: int  # 1, 2, ...
    token_ids: int  # int64 [rows]
    tables: int  # int64 [rows, max_blocks]
    max_blocks: int
    lens: int  # int64 [rows], context lengths including the new token
    rows: int
    splits: int  # of the longest context
    hidden: int  # the result, [rows, hidden_size] in the model's dtype
    logits: int  # the result, float32 [rows, vocab_size]


class Sizes(NamedTuple):
    """Numbers of the model, and the number of workers."""

    workers: int
    hidden_size: int
    num_heads: int
    group: int  # query heads that share a KV head
    intermediate_size: int
    vocab_size: int


class Weights(NamedTuple):
    """Addresses. Norms are float32, and everything else is as the model stores it."""

    are_packed: int  # 1: all matrices are packed, and so is the embedding if it is the head
    matrices: int  # int64 [num_layers, 4], addresses: qkv, o, gate_up, down
    biases: int  # int64 [num_layers, 4], addresses; 0: none
    no_bias: int  # zeros for every output of the largest matrix
    norms: int  # [num_layers, 2, hidden_size]
    head_norms: int  # [num_layers, 2, head_dim], of q and k; 0: none
    last_norm: int  # [hidden_size]
    embedding: int  # [vocab_size, hidden_size]
    head: int  # [vocab_size, hidden_size]
    cos: int  # [max_model_len, head_dim]
    sin: int  # [max_model_len, head_dim]
    pool: int  # KVCache.blocks


class Workspace(NamedTuple):
    """Addresses of scratch space. It is float32 except where a comment gives another type."""

    x: int  # [rows, hidden_size]
    qkv: int  # [rows, num_heads + 2 * num_kv_heads, head_dim]
    y: int  # [rows, max(hidden_size, 2 * intermediate_size)]
    act: int  # [rows, intermediate_size], in the type of like_x
    out: int  # [rows, num_kv_heads, splits, group, head_dim]
    peaks: int  # [rows, num_kv_heads, splits, group]
    sums: int  # [rows, num_kv_heads, splits, group]
    scratch: int  # [workers, rows, max(hidden_size, num_heads * head_dim)], in the type of like_x
    heads: int  # [workers, group + 1, head_dim]
    scores: int  # [workers, 4 * TILE]
    places: int  # int64 [workers, PLACES]
    counters: int  # int64 [num_layers * PHASES + 1, STRIDE]
    mailbox: int  # int64 [len(Step._fields)], the newest Step


class Model(NamedTuple):
    """The arguments that are the same in all steps."""

    like: np.ndarray  # an array of the type of weights, pool and hidden
    like_x: np.ndarray  # an array of the type of x for packed weights, see matmul.type_of()
    shape: Pool
    sizes: Sizes
    weights: Weights
    work: Workspace
    eps: np.float32


# The step


@entry
def decode_step(worker: int, seen: int, step: Step, model: Model) -> int:
    """Run `step` as worker 0. As a helper, take part in all steps after `seen` until none comes for a while.

    Return the number of the last step seen.
    """
    mailbox = integers(model.work.mailbox)
    if worker == 0:
        open_phases(integers(model.work.counters), model.shape.num_layers * PHASES + 1, step.number)
        embed(step, model)
        post_step(step, mailbox)
    while True:
        number = wait_for_step(mailbox, seen)
        if number == seen:
            return seen
        seen = number
        run_layers(worker, read_step(number, mailbox), model)
        if worker == 0:
            return seen


@kernel
def run_layers(worker: int, step: Step, model: Model) -> None:
    for layer in range(model.shape.num_layers):
        phase = layer * PHASES
        project_qkv(worker, phase, layer, step, model)
        attend_all(worker, phase + 1, layer, step, model)
        project_out(worker, phase + 2, layer, step, model)
        gate_and_up(worker, phase + 3, layer, step, model)
        project_down(worker, phase + 4, layer, step, model)
    compute_logits(worker, model.shape.num_layers * PHASES, step, model)


@kernel
def embed(step: Step, model: Model) -> None:
    """Set x [rows, hidden_size] to each token's embedding."""
    size, vocab_size, weights = model.sizes.hidden_size, model.sizes.vocab_size, model.weights
    embedding, x = stored(weights.embedding, model.like), floats(model.work.x)
    depth = depth_of(stored(0, model.like_x), embedding)
    is_packed = weights.are_packed and weights.embedding == weights.head
    for m in range(step.rows):
        token_id = get(integers(step.token_ids), m)
        for i in range(size):
            place = packed_place(token_id, i, vocab_size, size, depth) if is_packed else token_id * size + i
            write(x, m * size + i, read(embedding, place))


@kernel
def post_step(step: Step, mailbox: Memory) -> None:
    """Put a step into the mailbox.

    A worker that sees any field of it sees its phases open. The number comes last: a worker that sees it sees the rest.
    """
    store_release(mailbox, 1, step.token_ids)
    store_release(mailbox, 2, step.tables)
    store_release(mailbox, 3, step.max_blocks)
    store_release(mailbox, 4, step.lens)
    store_release(mailbox, 5, step.rows)
    store_release(mailbox, 6, step.splits)
    store_release(mailbox, 7, step.hidden)
    store_release(mailbox, 8, step.logits)
    store_release(mailbox, 0, step.number)


@kernel
def read_step(number: int, mailbox: Memory) -> Step:
    """Return the step in the mailbox. A helper that reads while the next step is written will find no task to take."""
    token_ids, tables, max_blocks = load_acquire(mailbox, 1), load_acquire(mailbox, 2), load_acquire(mailbox, 3)
    lens, rows, splits = load_acquire(mailbox, 4), load_acquire(mailbox, 5), load_acquire(mailbox, 6)
    return Step(
        number, token_ids, tables, max_blocks, lens, rows, splits, load_acquire(mailbox, 7), load_acquire(mailbox, 8)
    )


# The phases


@kernel
def project_qkv(worker: int, phase: int, layer: int, step: Step, model: Model) -> None:
    size = model.sizes.hidden_size
    outputs = (model.sizes.num_heads + 2 * model.shape.num_kv_heads) * model.shape.head_dim
    scratch, is_ready, each = scratch_of(worker, step, model), False, outputs_per_task(outputs, model.sizes.workers)
    for task in tasks(integers(model.work.counters), phase, step.number, -(-outputs // each)):
        if not is_ready:
            norm_rows(floats(model.work.x), step.rows, size, layer * 2, model, scratch)
            is_ready = True
        start, end = task * each, min((task + 1) * each, outputs)
        multiply_matrix(QKV, layer, start, end, scratch, size, floats(model.work.qkv), outputs, step, model)


@kernel
def attend_all(worker: int, phase: int, layer: int, step: Step, model: Model) -> None:
    num_kv_heads, size = model.shape.num_kv_heads, model.shape.head_dim
    heads = at(floats(model.work.heads), worker * (model.sizes.group + 1) * size)
    for task in tasks(integers(model.work.counters), phase, step.number, step.rows * num_kv_heads * step.splits):
        row, kv, split = task // step.splits // num_kv_heads, task // step.splits % num_kv_heads, task % step.splits
        position, start = get(integers(step.lens), row) - 1, split * SPLIT
        if start <= position:
            end = min(position + 1, start + SPLIT)
            if end == position + 1:
                write_key_and_value(layer, row, kv, position, heads, step, model)
            rotate_queries(layer, row, kv, position, heads, model)
            attend_split(worker, layer, row, kv, position, start, end, task, heads, step, model)


@kernel
def attend_split(
    worker: int, layer: int, row: int, kv: int, position: int, start: int, end: int, task: int, heads: Memory,
    step: Step, model: Model,
) -> None:  # fmt: skip
    """Attend to the keys from start to end - 1 with the query heads that share a KV head.

    heads float32 [group, head_dim]
    """
    work, shape, group, to = model.work, model.shape, model.sizes.group, task * model.sizes.group
    pool, table = stored(model.weights.pool, model.like), at(integers(step.tables), row * step.max_blocks)
    scores, places = at(floats(work.scores), worker * 4 * TILE), at(integers(work.places), worker * PLACES)
    out, peaks, sums = at(floats(work.out), to * shape.head_dim), at(floats(work.peaks), to), at(floats(work.sums), to)
    attend(heads, group, group, position, pool, shape, layer, kv, table, start, end, scores, places, out, peaks, sums)


@kernel
def rotate_queries(layer: int, row: int, kv: int, position: int, heads: Memory, model: Model) -> None:
    """Set heads float32 [group, head_dim] to the rotated and scaled queries."""
    size = model.shape.head_dim
    scale = np.float32(1) / np.sqrt(np.float32(size))
    for g in range(model.sizes.group):
        head = kv * model.sizes.group + g
        norm_and_rotate_head(
            layer, row, head, 0, position, scale, at(heads, model.sizes.group * size), at(heads, g * size), model
        )


@kernel
def write_key_and_value(layer: int, row: int, kv: int, position: int, heads: Memory, step: Step, model: Model) -> None:
    """Write the new token's key and value to its slot. `heads` is scratch space."""
    shape = model.shape
    block = get(integers(step.tables), row * step.max_blocks + position // shape.block_size)
    key = at(stored(model.weights.pool, model.like), slot(shape, layer, kv, block, position % shape.block_size))
    norm_and_rotate_head(layer, row, model.sizes.num_heads + kv, 1, position, np.float32(1), heads, key, model)
    value = model.sizes.num_heads + shape.num_kv_heads + kv
    to = at(key, shape.block_size * shape.num_kv_heads * shape.head_dim)
    copy(head_of(row, value, model), shape.head_dim, np.float32(1), to)


@kernel
def norm_and_rotate_head(
    layer: int, row: int, head: int, which: int, position: int, scale: float, scratch: Memory, out: Memory, model: Model
) -> None:
    """Normalize and rotate a head: of a query if `which` is 0, of a key if it is 1."""
    weights, size, like = model.weights, model.shape.head_dim, model.like
    cos, sin = at(stored(weights.cos, like), position * size), at(stored(weights.sin, like), position * size)
    norm = weights.head_norms + 4 * (layer * 2 + which) * size if weights.head_norms else 0
    norm_and_rotate(head_of(row, head, model), norm, 1, cos, sin, model.eps, scale, size, scratch, out)


@kernel
def head_of(row: int, head: int, model: Model) -> Memory:
    heads = model.sizes.num_heads + 2 * model.shape.num_kv_heads
    return at(floats(model.work.qkv), (row * heads + head) * model.shape.head_dim)


@kernel
def project_out(worker: int, phase: int, layer: int, step: Step, model: Model) -> None:
    size, outputs = model.sizes.num_heads * model.shape.head_dim, model.sizes.hidden_size
    scratch, is_ready, each = scratch_of(worker, step, model), False, outputs_per_task(outputs, model.sizes.workers)
    for task in tasks(integers(model.work.counters), phase, step.number, -(-outputs // each)):
        if not is_ready:
            merge_splits(scratch, step, model)
            is_ready = True
        start, end = task * each, min((task + 1) * each, outputs)
        multiply_matrix(OUT, layer, start, end, scratch, size, floats(model.work.y), outputs, step, model)
        add_to(floats(model.work.x), floats(model.work.y), step.rows, outputs, start, end)


@kernel
def merge_splits(scratch: Memory, step: Step, model: Model) -> None:
    """Set scratch [rows, num_heads * head_dim] to the attention of all heads."""
    work, group, size = model.work, model.sizes.group, model.shape.head_dim
    for row in range(step.rows):
        splits = -(-get(integers(step.lens), row) // SPLIT)
        for kv in range(model.shape.num_kv_heads):
            i = (row * model.shape.num_kv_heads + kv) * step.splits * group
            out, peaks, sums = at(floats(work.out), i * size), at(floats(work.peaks), i), at(floats(work.sums), i)
            merge(out, peaks, sums, splits, group, size, at(scratch, (row * model.sizes.num_heads + kv * group) * size))


@kernel
def gate_and_up(worker: int, phase: int, layer: int, step: Step, model: Model) -> None:
    size, outputs = model.sizes.hidden_size, model.sizes.intermediate_size
    scratch, is_ready, each = scratch_of(worker, step, model), False, outputs_per_task(outputs, model.sizes.workers)
    y, act = floats(model.work.y), stored(model.work.act, model.like_x)  # [rows, 2, outputs], [rows, outputs]
    for task in tasks(integers(model.work.counters), phase, step.number, -(-outputs // each)):
        if not is_ready:
            norm_rows(floats(model.work.x), step.rows, size, layer * 2 + 1, model, scratch)
            is_ready = True
        start, end = task * each, min((task + 1) * each, outputs)
        for first in (0, outputs):
            multiply_matrix(GATE_UP, layer, first + start, first + end, scratch, size, y, 2 * outputs, step, model)
        for row in range(step.rows):
            gate, to = at(y, row * 2 * outputs + start), at(act, row * outputs + start)
            silu_and_mul_row(gate, at(gate, outputs), end - start, to)


@kernel
def project_down(worker: int, phase: int, layer: int, step: Step, model: Model) -> None:
    size, outputs = model.sizes.intermediate_size, model.sizes.hidden_size
    act, each = stored(model.work.act, model.like_x), outputs_per_task(outputs, model.sizes.workers)
    for task in tasks(integers(model.work.counters), phase, step.number, -(-outputs // each)):
        start, end = task * each, min((task + 1) * each, outputs)
        multiply_matrix(DOWN, layer, start, end, act, size, floats(model.work.y), outputs, step, model)
        add_to(floats(model.work.x), floats(model.work.y), step.rows, outputs, start, end)


@kernel
def compute_logits(worker: int, phase: int, step: Step, model: Model) -> None:
    """Compute the last norm, and the logits of all rows."""
    size, outputs, logits = model.sizes.hidden_size, model.sizes.vocab_size, floats(step.logits)
    scratch, is_ready, each = scratch_of(worker, step, model), False, outputs_per_task(outputs, 4 * model.sizes.workers)
    for task in tasks(integers(model.work.counters), phase, step.number, -(-outputs // each)):
        if not is_ready:
            for row in range(step.rows):
                x, to = at(floats(model.work.x), row * size), at(scratch, row * size)
                rms_norm(x, floats(model.weights.last_norm), model.eps, size, to)
            is_ready = True
        if task == 0:
            copy(scratch, step.rows * size, np.float32(1), stored(step.hidden, model.like))
        start, end = task * each, min((task + 1) * each, outputs)
        multiply_weight(model.weights.head, 0, start, end, scratch, size, logits, outputs, step, model)


@kernel
def multiply_matrix(
    which: int, layer: int, start: int, end: int, x: Memory, size: int, out: Memory, outputs: int, step: Step,
    model: Model,
) -> None:  # fmt: skip
    """Set out[row, start .. end - 1] to x[row] times these outputs of a layer's matrix.

    x [rows, size]; out [rows, outputs]
    """
    i = layer * 4 + which
    weight, bias = get(integers(model.weights.matrices), i), get(integers(model.weights.biases), i)
    multiply_weight(weight, bias, start, end, x, size, out, outputs, step, model)


@kernel
def multiply_weight(
    weight: int, bias: int, start: int, end: int, x: Memory, size: int, out: Memory, outputs: int, step: Step,
    model: Model,
) -> None:  # fmt: skip
    like = model.like
    if model.weights.are_packed:
        bias_or_zeros = stored(bias if bias else model.weights.no_bias, like)
        matmul(x, step.rows, size, stored(weight, like), bias_or_zeros, start, end, outputs, out, outputs)
    else:
        linear(stored(weight, like), stored(bias, like), bias != 0, start, end, x, size, step.rows, out, outputs)


@kernel
def scratch_of(worker: int, step: Step, model: Model) -> Memory:
    """Return the worker's scratch space: [rows, max(hidden_size, num_heads * head_dim)] in the type of like_x."""
    width = max(model.sizes.hidden_size, model.sizes.num_heads * model.shape.head_dim)
    return at(stored(model.work.scratch, model.like_x), worker * step.rows * width)


@kernel
def norm_rows(x: Memory, rows: int, size: int, which: int, model: Model, out: Memory) -> None:
    """Normalize x [rows, size] into out, with norm number `which` of the model."""
    weight = at(floats(model.weights.norms), which * size)
    for row in range(rows):
        rms_norm(at(x, row * size), weight, model.eps, size, at(out, row * size))


@kernel
def add_to(x: Memory, y: Memory, rows: int, size: int, start: int, end: int) -> None:
    """Add y[row, i] to x[row, i] for i from start to end - 1."""
    for row in range(rows):
        for i in range(row * size + start, row * size + end):
            write(x, i, read(x, i) + read(y, i))


# The caller

NO_STEP = Step(*[0] * len(Step._fields))


class DecodeRunner:
    """The decode step of a model, for one to `max_rows` sequences.

    `max_rows` is MAX_ROWS if the model's linear layers are packed, and FEW_ROWS otherwise.
    """

    def __init__(self, model: LlamaForCausalLM, kv_cache: "KVCache", max_model_len: int) -> None:
        self._model, self._blocks = model, kv_cache.blocks  # kernels hold their addresses, so they must stay alive
        self._max_model_len = max_model_len
        self.max_rows = MAX_ROWS if isinstance(model.lm_head, PackedLinear) else FEW_ROWS
        config, workers = model.config, torch.get_num_threads()
        _, num_layers, _, block_size, num_kv_heads, head_dim = kv_cache.blocks.shape
        self._shape = Pool(num_layers, block_size, num_kv_heads, head_dim)
        heads = config.num_attention_heads
        self._sizes = Sizes(
            workers, config.hidden_size, heads, heads // num_kv_heads, config.intermediate_size, config.vocab_size
        )
        self._kept: list[Tensor] = []  # a helper may read from it after the last step
        # even if the model gets new weights
        self._owned = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
        weights = self._take_weights()
        work = self._make_workspace(-(-max_model_len // SPLIT))
        dtype, eps = kv_cache.blocks.dtype, np.float32(config.rms_norm_eps)
        self._fixed = Model(like_of(dtype), like_of(type_of(dtype)), self._shape, self._sizes, weights, work, eps)
        self._helpers = Helpers(workers - 1, partial(help_with, self._fixed, self._kept))

    def run(
        self, token_ids: list[int], block_tables: list[list[int]], context_lens: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Compute the last token of each sequence's context.

        Return hidden [rows, hidden_size] and logits float32 [rows, vocab_size].
        """
        rows = len(token_ids)
        assert 1 <= rows <= self.max_rows, f"at most {self.max_rows} rows are allowed, got {rows}"
        self._check(token_ids, block_tables, context_lens)
        width = max(len(table) for table in block_tables)
        numbers = token_ids + context_lens
        for table in block_tables:
            numbers += table + [0] * (width - len(table))
        given = torch.tensor(numbers, dtype=torch.int64)  # [rows + rows + rows * width]
        hidden = torch.empty(rows, self._sizes.hidden_size, dtype=self._blocks.dtype)
        logits = torch.empty(rows, self._sizes.vocab_size)
        at, splits = given.data_ptr(), -(-max(context_lens) // SPLIT)
        step = Step(
            *(self._helpers.start_step(), at, at + 16 * rows, width, at + 8 * rows, rows, splits),
            *(hidden.data_ptr(), logits.data_ptr()),
        )
        decode_step(0, step.number - 1, step, self._fixed)
        return hidden, logits

    def _check(self, token_ids: list[int], block_tables: list[list[int]], context_lens: list[int]) -> None:
        """Assert that all numbers are in range, since a kernel would read and write out of bounds."""
        size, longest = self._sizes.vocab_size, max(context_lens)
        assert min(token_ids) >= 0 and max(token_ids) < size, f"token ids {token_ids}, of {size}"
        assert longest <= self._max_model_len, f"at most {self._max_model_len} tokens are allowed, got {longest}"
        for table, length in zip(block_tables, context_lens, strict=True):
            slots = len(table) * self._shape.block_size
            assert 1 <= length <= slots, f"a context of {length} tokens in {slots} slots"

    def _take_weights(self) -> Weights:
        model: Any = getattr(self._model.model, "plain", self._model.model)  # a CpuModel keeps the plain one
        addresses, biases = [], []
        for layer in model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
            addresses.append([linear.weight.data_ptr() for linear in linears])
            biases.append([0 if linear.bias is None else linear.bias.data_ptr() for linear in linears])
        norms = [norm for layer in model.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        head_norms = 0
        if self._model.config.qk_norm:
            of_heads = [norm for layer in model.layers for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm)]
            head_norms = self._keep(torch.stack([norm.weight.detach().float() for norm in of_heads]))
        return Weights(
            are_packed=int(isinstance(self._model.lm_head, PackedLinear)),
            matrices=self._keep(torch.tensor(addresses)),
            biases=self._keep(torch.tensor(biases)),
            no_bias=self._keep(self._blocks.new_zeros(max(map(len, self._model.parameters())))),
            norms=self._keep(torch.stack([norm.weight.detach().float() for norm in norms])),
            head_norms=head_norms,
            last_norm=self._keep(model.norm.weight.detach().float()),
            embedding=model.embed_tokens.weight.data_ptr(),
            head=self._model.lm_head.weight.data_ptr(),
            cos=model.rotary_emb.cos.data_ptr(),
            sin=model.rotary_emb.sin.data_ptr(),
            pool=self._blocks.data_ptr(),
        )

    def _make_workspace(self, splits: int) -> Workspace:
        workers, size, heads, group, inner, _ = self._sizes
        num_layers, _, num_kv_heads, head_dim = self._shape
        rows, dtype = self.max_rows, type_of(self._blocks.dtype)
        splits_of_heads = rows * splits * heads

        def numbers(count: int, dtype: torch.dtype = torch.float32) -> int:
            return self._keep(torch.empty(count, dtype=dtype))

        return Workspace(
            x=numbers(rows * size),
            qkv=numbers(rows * (heads + 2 * num_kv_heads) * head_dim),
            y=numbers(rows * max(size, 2 * inner)),
            act=numbers(rows * inner, dtype),
            out=numbers(splits_of_heads * head_dim),
            peaks=numbers(splits_of_heads),
            sums=numbers(splits_of_heads),
            scratch=numbers(workers * rows * max(size, heads * head_dim), dtype),
            heads=numbers(workers * (group + 1) * head_dim),
            scores=numbers(workers * 4 * TILE),
            places=self._keep(torch.empty(workers * PLACES, dtype=torch.int64)),
            counters=self._keep(torch.zeros((num_layers * PHASES + 1) * STRIDE, dtype=torch.int64)),
            mailbox=self._keep(torch.zeros(len(Step._fields), dtype=torch.int64)),
        )

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()


def help_with(fixed: Model, kept: list[Tensor], worker: int, seen: int) -> int:
    """Take part in steps. `kept` is referenced here because the helper works with its addresses."""
    return decode_step(worker, seen, NO_STEP, fixed)
