"""A twin of each kernel in plain PyTorch, which is easier to read. Tests compare the two.

All twins compute in float32, whatever the storage type.
"""

import math

import torch
from torch import Tensor


def dot_rows(row: Tensor, x: Tensor) -> Tensor:
    """Return the dot products [rows] of a stored row [size] and each row of x [rows, size]."""
    return x @ row.float()


def linear(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Return x [rows, size] times `weight` [outputs, size], plus `bias` [outputs]: [rows, outputs]."""
    out = x @ weight.float().T  # [rows, outputs]
    return out if bias is None else out + bias.float()


def exp(x: Tensor) -> Tensor:
    """Return e to the power of x, or of 88 if x is larger. Powers below 2**-126.5 are 0."""
    x = x.double()
    return torch.where(x < -126.5 * math.log(2), 0, x.clamp(max=88).exp()).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize x [..., size] with `weight` [size]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + size / 2]) of x [..., size] by their angles; cos and sin are [size / 2]."""
    a, b = x.chunk(2, dim=-1)  # [..., size / 2] each
    cos, sin = cos.float(), sin.float()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def gather(pool: Tensor, layer: int, kv: int, table: list[int], start: int, end: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of the positions from start to end - 1, which are in the blocks of `table`.

    pool [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim] -> [end - start, head_dim] each
    """
    both = pool[table, layer, :, :, kv].float().transpose(0, 1).flatten(1, 2)  # [2, slots, head_dim]
    return both[0, start:end], both[1, start:end]


def attend(
    q: Tensor, keys: Tensor, values: Tensor, group: int, first: int, start: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend to the keys from position `start` on. Return weighted sums of values, peaks, and sums of weights.

    Row r of q, which is scaled, belongs to the query at position first + r // group, and sees keys up to that position.
    q [rows, head_dim]; keys, values [count, head_dim] -> [rows, head_dim], [rows], [rows]
    """
    scores = q @ keys.T  # [rows, count]
    own = first + torch.arange(len(q)) // group  # [rows], positions
    hidden = start + torch.arange(len(keys)) > own[:, None]  # [rows, count]
    scores = scores.masked_fill(hidden, -torch.inf)
    peaks = scores.amax(1)  # [rows]
    weights = (scores - peaks[:, None]).exp()
    return weights @ values, peaks, weights.sum(1)


def merge(out: Tensor, peaks: Tensor, sums: Tensor) -> Tensor:
    """Merge attention to several splits of the keys.

    out [splits, rows, head_dim]; peaks, sums [splits, rows] -> [rows, head_dim]
    """
    shares = (peaks - peaks.amax(0)).exp()  # [splits, rows], relative to the largest peak
    return (shares[..., None] * out).sum(0) / (shares * sums).sum(0)[:, None]


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, for any shape."""
    return gate * torch.sigmoid(gate) * up
