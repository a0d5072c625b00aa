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
    biases: int  # int64 [num_layers, 4], addresses; 0: none
    norms: int  # [num_layers, 2, hidden_size]
    head_norms: int  # [num_layers, 2, head_dim], of q and k; 0: none
    last_norm: int  # [hidden_size]
    embedding: int  # [vocab_size, hidden_size]
    head: int  # [vocab_size, hidden_size]
    cos: int  # [max_model_len, head_dim]
    sin: int  # [max_model_len, head_dim]
    pool: int  # KVCache.blocks


class Room(NamedTuple):
    """Addresses of what a step works in: float32, but for the last three."""

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
    places: int  # int64 [workers, PLACES]
    counters: int  # int64 [num_layers * PHASES + 1, STRIDE]
    mailbox: int  # int64 [len(Step._fields)], the newest Step


class Model(NamedTuple):
    """What no step changes."""

    like: np.ndarray  # an array of the type that weights, pool and hidden are stored in
    shape: Pool
    sizes: Sizes
    weights: Weights
    room: Room
    eps: np.float32
