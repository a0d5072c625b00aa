"""Each kernel in plain torch. Read a twin before its kernel: it says what, the kernel says how. Tests compare the two.

All of them compute in float32, whatever is stored.
"""

import torch
from torch import Tensor


def products(row: Tensor, x: Tensor) -> Tensor:
    """Return a stored row times each row of x. row [size]; x [rows, size] -> [rows]"""
    return x @ row.float()


def linear(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """weight [outputs, size]; bias [outputs]; x [rows, size] -> [rows, outputs]"""
    out = x @ weight.float().T  # [rows, outputs]
    return out if bias is None else out + bias.float()


def exp(x: Tensor) -> Tensor:
    """x below -87 counts as -87, above 88 as 88. Any shape"""
    return x.double().clamp(-87, 88).exp().float()


def normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., size]; weight [size] -> [..., size]"""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + size / 2]) by their angles. x [..., size]; cos, sin [size / 2] -> [..., size]"""
    a, b = x.chunk(2, dim=-1)  # [..., size / 2] each
    cos, sin = cos.float(), sin.float()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def gather(pool: Tensor, layer: int, kv: int, table: list[int], start: int, end: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the positions start .. end - 1, which lie in the blocks of `table`.

    pool [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim] -> [end - start, head_dim] each
    """
    both = pool[table, layer, :, :, kv].float().transpose(0, 1).flatten(1, 2)  # [2, slots, head_dim]
    return both[0, start:end], both[1, start:end]


def attend(
    q: Tensor, keys: Tensor, values: Tensor, group: int, first: int, start: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention to the keys from position `start` on: its sum over values, not divided yet; peaks; sums of weights.

    Row r of q, which is scaled, is of the query at position first + r // group. It sees the keys up to itself.
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
    """Attention to all keys from that to parts of them.

    out [parts, rows, head_dim]; peaks, sums [parts, rows] -> [rows, head_dim]
    """
    shares = (peaks - peaks.amax(0)).exp()  # [parts, rows], of the largest peak
    return (shares[..., None] * out).sum(0) / (shares * sums).sum(0)[:, None]


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Any shape"""
    return gate * torch.sigmoid(gate) * up
