"""What Python and the kernels agree on: the numbers of a step, and the memory that they point to.

The kernels get their arguments in memory, as 64-bit numbers in the order of these named tuples: addresses and sizes. So
a step is called like a function in C, and this module needs no Numba. A field with a shape is the address of an array.
"""

import os
from typing import NamedTuple

import torch
from torch import Tensor

WIDTH = 16  # numbers of a vector
COLUMNS = 2 * WIDTH  # outputs of a weight in a block of registers
CHUNK = 128  # rows of a task, at most
STRIDE = 8  # int64 numbers per phase, one cache line: the counter word, and the number of finished tasks
PHASES = 7  # of a layer
LAST_PHASES = 3  # after the layers
PART = 8192  # logits of a row per task: few enough to stay in a core's cache

# Matrices

# All of q, k and v are in Q, and K and V are empty, unless they have several formats
Q, K, V, OUT, GATE, UP, DOWN = range(7)
MATRICES = 7  # of a layer
# numbers of a matrix: addresses of its weight, its scales and its bias, its Format (0: floating point), and its outputs
MATRIX = 5
SUMS = 3  # of a group of quantized x: the whole group, its first half, and its second half

# Attention

TILE = 128  # keys per tile: their scores, keys and values fit in the core's cache
SPLIT = 512  # keys whose results are joined as one: a job of a decode, or a part of a chunk's context
AHEAD = 32  # keys to prefetch ahead: blocks are scattered in the pool, where no hardware prefetcher can predict them
PLACES = TILE + AHEAD + WIDTH  # length of the `places` of a tile
SCORES = 4 * (TILE + WIDTH)  # length of the scratch space: the scores of four rows, and sixteen sums of each
INT8_ROWS = 4  # rows of q that are multiplied by keys and values in int8 at a time
INT8_SCORES = INT8_ROWS * TILE + INT8_ROWS * 2 * TILE // 4 + 2 * TILE + WIDTH  # the same for int8, before the queries
# numbers of a job: first row, number of queries, sequence, first key, end of its keys, split (-1: none), and whether it
# writes the key and value of its token
JOB = 7
MERGE = 3  # numbers of a merge: the row, its first split, and its number of splits


def int8_scratch_size(job_rows: int, head_dim: int) -> int:
    """Return the size of a worker's scratch space for keys and values in int8, in float32 numbers."""
    return INT8_SCORES + 2 * -(-job_rows // WIDTH) * WIDTH + job_rows * 2 * head_dim


# Arguments


class Pool(NamedTuple):
    """The shape of KVCache.blocks: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int


class Int8Pool(NamedTuple):
    """The shape of a pool in int8: [num_blocks, num_layers, num_kv_heads, block_size * (2 * head_dim + 8)] bytes."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int


class Sizes(NamedTuple):
    """Numbers of the model, and the number of workers."""

    workers: int
    hidden_size: int
    num_heads: int
    group: int  # query heads that share a KV head
    intermediate_size: int
    job_rows: int  # rows of q in a job, at most
    widest: int  # size of the longest row of x
    scratch: int  # float32 numbers for a worker's attention


class Weights(NamedTuple):
    """Addresses of weights. Norms are float32, and everything else has the type in which the model stores it."""

    matrices: int  # int64 [num_layers * MATRICES + 1, MATRIX]: q, k, v, o, gate, up, down of each layer; the head
    norms: int  # [num_layers, 2, hidden_size]
    head_norms: int  # [num_layers, 2, head_dim], of q and k; 0: none
    last_norm: int  # [hidden_size]
    eps: int  # float32 [1], of the norms
    embedding: int  # [vocab_size, hidden_size]; 0: the head's weight is used
    vocab_size: int  # rows of the embedding and of the head
    first_token: int  # the token of row 0: 0, unless ranks divide the vocabulary
    cos: int  # [max_model_len, head_dim]
    sin: int  # [max_model_len, head_dim]
    pool: int  # KVCache.blocks


class Workspace(NamedTuple):
    """Addresses of the workers' scratch space. All numbers are float32 unless a comment gives another type."""

    normed: int  # [workers, CHUNK, hidden_size], in type_of() the weights
    tile: int  # [workers, CHUNK, 2 * COLUMNS]
    values: int  # int8 [workers, CHUNK, widest], quantized x
    scales: int  # [workers, CHUNK, widest / GROUP]
    sums: int  # [workers, CHUNK, widest / GROUP, SUMS]
    heads: int  # [workers, 3 * job_rows + 1, head_dim]
    peaks: int  # [workers, 4, job_rows], and the sums
    scratch: int  # [workers, scratch] for attention
    places: int  # int64 [workers, PLACES]
    counters: int  # int64 [num_layers * PHASES + LAST_PHASES, STRIDE]
    mailbox: int  # int64 [len(Step._fields)], the newest Step


class Step(NamedTuple):
    """One step."""

    number: int  # 1, 2, ...
    rows: int  # tokens; 0: the layers are skipped, and the step starts from `hidden` or `logits`
    token_ids: int  # int64 [rows]; 0: x holds the embeddings already, or the output of earlier layers
    positions: int  # int64 [rows]
    slots: int  # int64 [rows], slot of each token; -1: its attention job writes its key and value
    stored_rows: int  # `rows` if the store phase has any work, else 0
    tables: int  # int64 [num_seqs, max_blocks]
    max_blocks: int
    jobs: int  # int64 [num_jobs, JOB]
    num_jobs: int
    merges: int  # int64 [num_merges, MERGE]
    num_merges: int
    num_splits: int  # of all decodes
    outputs: int  # int64 [num_outputs], the rows whose logits are computed
    num_outputs: int
    hidden: int  # [rows, hidden_size] in the model's dtype; 0: the last norm and the logits are not computed
    logits: int  # float32 [num_outputs, vocab_size]; 0: none
    vocab_size: int
    tokens: int  # int64 [num_outputs], the likeliest tokens; 0: none
    logprobs: int  # float32 [num_outputs], their log-probabilities
    work: int  # address of the scratch space, see step.Buffers
    first_half: int  # the first half of a layer to run: 2 * layer for its attention, and 2 * layer + 1 for its MLP
    end_half: int  # the half after the last one
    target: int  # float32 [rows, hidden_size], to which each half adds its output: x, or a rank's part of it


NO_STEP = Step(*[0] * len(Step._fields))

# Weights


def has_dot_of_pairs() -> bool:
    """Return whether this processor has AVX-512 BF16, and Numba compiles for this processor."""
    if os.environ.get("NUMBA_CPU_NAME") or os.environ.get("NUMBA_CPU_FEATURES"):
        return False
    from llvmlite import binding

    return bool(binding.get_host_cpu_features().get("avx512bf16"))


def type_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of x for a weight's dtype: bfloat16 if the processor multiplies pairs of it, else float32."""
    return dtype if dtype == torch.bfloat16 and has_dot_of_pairs() else torch.float32


def columns_of(weight: Tensor) -> Tensor:
    """Return a view of the packed part of a packed `weight`: [outputs / 16, size / depth, 16, depth]."""
    (outputs, size), depth = weight.shape, 2 if type_of(weight.dtype) == torch.bfloat16 else 1
    return weight[: outputs // COLUMNS * COLUMNS].view(-1, size // depth, WIDTH, depth)


PACKED_AT_A_TIME = 4  # columns of 16 outputs: a larger copy would leave holes in memory between the weights


def pack(weight: Tensor) -> None:
    """Put the numbers of `weight` [outputs, size] in the order that matmul.py describes. bfloat16 needs an even `size`.

    All memory is allocated before anything moves, so an error never leaves a weight half packed.
    """
    packed = columns_of(weight)
    plain = packed.view(-1, WIDTH, packed.shape[1], packed.shape[3])
    copy = torch.empty_like(packed[:PACKED_AT_A_TIME])
    for source, target in zip(plain.split(PACKED_AT_A_TIME), packed.split(PACKED_AT_A_TIME), strict=True):
        part = copy[: len(source)]
        part.copy_(source.transpose(1, 2))
        target.copy_(part)
