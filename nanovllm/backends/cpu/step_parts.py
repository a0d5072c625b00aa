"""What a step of few rows is made of: addresses and sizes, in tuples with names."""

from typing import NamedTuple

import numpy as np

from .attention import Pool


class Step(NamedTuple):
    """One step. What is no number or size is an address."""

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
    vocab_size: int


class Weights(NamedTuple):
    """Addresses. Norms are float32, all else is as the model stores it."""

    matrices: int  # int64 [num_layers, 4], addresses: qkv, o, gate_up, down
    packed: int  # int64 [num_layers, 4], addresses of the same, packed; 0: they are not
    biases: int  # int64 [num_layers, 4], addresses; 0: none
    no_bias: int  # zeros, as many as a matrix has outputs
    norms: int  # [num_layers, 2, hidden_size]
    head_norms: int  # [num_layers, 2, head_dim], of q and k; 0: none
    last_norm: int  # [hidden_size]
    embedding: int  # [vocab_size, hidden_size]
    head: int  # [vocab_size, hidden_size]
    packed_head: int  # the same, packed
    cos: int  # [max_model_len, head_dim]
    sin: int  # [max_model_len, head_dim]
    pool: int  # KVCache.blocks


class Room(NamedTuple):
    """Addresses of what a step works in: float32, but for the last three and for x that meets weights."""

    x: int  # [rows, hidden_size]
    qkv: int  # [rows, num_heads + 2 * num_kv_heads, head_dim]
    y: int  # [rows, max(hidden_size, 2 * intermediate_size)]
    act: int  # [rows, intermediate_size], as x meets the weights
    out: int  # [rows, num_kv_heads, splits, group, head_dim]
    peaks: int  # [rows, num_kv_heads, splits, group]
    sums: int  # [rows, num_kv_heads, splits, group]
    own: int  # [workers, rows, max(hidden_size, num_heads * head_dim)], as x meets the weights
    heads: int  # [workers, group + 1, head_dim]
    scores: int  # [workers, 4 * PART]
    places: int  # int64 [workers, PLACES]
    counters: int  # int64 [num_layers * PHASES + 1, STRIDE]
    mailbox: int  # int64 [len(Step._fields)], the newest Step


class Model(NamedTuple):
    """The part that is the same in all steps."""

    like: np.ndarray  # an array of the type that weights, pool and hidden are stored in
    like_x: np.ndarray  # of the type in which x meets packed weights: see matmul.type_of()
    shape: Pool
    sizes: Sizes
    weights: Weights
    room: Room
    eps: np.float32
