"""rotate_and_write beside its twin, and the twin beside the model's own layers: to the last bit but for norms."""

from typing import Any

import pytest
import torch

from ...backends.gpu import plain
from ...llama.model import RMSNorm, Rotate
from .pools import TOLERANCE, Shape

FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
SHAPES = [  # num_kv_heads, group, head_dim, block_size, dtype; with norms of heads
    (Shape(1, 1, 16, 1, FLOAT), False),
    (Shape(2, 4, 64, 16, BRAIN), True),
    (Shape(2, 8, 128, 128, HALF), False),
    (Shape(3, 3, 24, 3, FLOAT), True),
    (Shape(2, 5, 80, 16, BRAIN), False),
    (Shape(1, 7, 256, 3, HALF), True),
]
MAX_MODEL_LEN, LAYER = 300, 1


def make_step(shape: Shape, has_norms: bool, device: str) -> tuple[dict[str, Any], torch.Tensor]:
    """The arguments but `blocks` and q_out, for 6 rows of which two are padding; and an empty pool."""
    generator = torch.Generator().manual_seed(shape.head_dim)
    num_slots = 5 * shape.block_size
    slots = torch.randperm(num_slots, generator=generator)[:6].tolist() + [0] * 6
    slots = [slots[0], -1, *slots[1:4], -1]
    positions = [299, 10**9, 0, 17, 128, 0]  # a padding row's is not looked at
    heads = (shape.group + 2) * shape.num_kv_heads
    angles = torch.rand(MAX_MODEL_LEN, shape.head_dim // 2, generator=generator).repeat(1, 2) * 7
    norms = [1 + torch.randn(shape.head_dim, generator=generator) / 4 for _ in range(2)] if has_norms else [None, None]
    arguments = {
        "qkv": torch.randn(6, heads, shape.head_dim, generator=generator).to(device, shape.dtype),
        "cos": angles.cos().to(device, shape.dtype),
        "sin": angles.sin().to(device, shape.dtype),
        "positions": torch.tensor(positions, device=device),
        "slot_mapping": torch.tensor(slots, device=device),
        "layer": LAYER,
        "q_norm": norms[0] if norms[0] is None else norms[0].to(device, shape.dtype),
        "k_norm": norms[1] if norms[1] is None else norms[1].to(device, shape.dtype),
        "eps": 1e-5,
    }
    pool = (5, LAYER + 2, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
    return arguments, torch.full(pool, 7, dtype=shape.dtype, device=device)


@pytest.mark.parametrize(("shape", "has_norms"), SHAPES)
def test_as_its_twin(shape: Shape, has_norms: bool, device: str) -> None:
    from ...backends.gpu.rope_write import rotate_and_write

    arguments, empty = make_step(shape, has_norms, device)
    pools, outs = [], []
    for run in (rotate_and_write, plain.rotate_and_write):
        pools.append(empty.clone())
        outs.append(torch.full((6, shape.group * shape.num_kv_heads, shape.head_dim), 7).to(empty))
        run(**arguments, blocks=pools[-1], q_out=outs[-1])
    tolerance = TOLERANCE[shape.dtype] if has_norms or shape.dtype == FLOAT else 0  # a sum of squares has an order
    torch.testing.assert_close(*outs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(*pools, rtol=tolerance, atol=tolerance)
    assert torch.equal(pools[0] == 7, pools[1] == 7), "other slots were written than the rows have"
    assert not outs[0][1].any() and not outs[0][5].any(), "a padding row has queries"


@pytest.mark.parametrize(("shape", "has_norms"), SHAPES)
def test_the_twin_as_the_model(shape: Shape, has_norms: bool) -> None:
    arguments, pool = make_step(shape, has_norms, "cpu")
    num_heads, rows = shape.group * shape.num_kv_heads, [0, 2, 3, 4]
    q, k, v = arguments["qkv"].split((num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
    if has_norms:
        norm = RMSNorm(shape.head_dim, arguments["eps"]).to(shape.dtype)
        norm.weight.data = arguments["q_norm"]
        q = norm(q)
        norm.weight.data = arguments["k_norm"]
        k = norm(k)
    cos, sin = (arguments[name][arguments["positions"][rows]].unsqueeze(1) for name in ("cos", "sin"))
    q_out = torch.empty(6, num_heads, shape.head_dim, dtype=shape.dtype)
    plain.rotate_and_write(**arguments, blocks=pool, q_out=q_out)
    assert torch.equal(q_out[rows], Rotate()(q[rows], cos, sin))
    for row, slot in zip(rows, arguments["slot_mapping"][rows].tolist(), strict=True):
        written = pool[slot // shape.block_size, LAYER, :, slot % shape.block_size]
        keys = Rotate()(k[rows], cos, sin)[rows.index(row)]
        assert torch.equal(written, torch.stack((keys, v[row])))
    assert (pool == 7).all(-1).sum() == pool[..., 0].numel() - 2 * 4 * shape.num_kv_heads
