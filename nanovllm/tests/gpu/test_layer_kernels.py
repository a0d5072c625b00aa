"""The other kernels of a layer compared with their plain versions, and rotate_and_write with the model's own layers."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ...backends.gpu import plain
from ...backends.gpu.ops import triton_ops
from ...llama.model import RMSNorm, Rotate
from .pools import DTYPES, TOLERANCE, KernelShape, as_stored

FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16


# Embedding, norm and activation


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 100, 576])
def test_embed_replaces_placeholders_and_copies_rows_of_the_weight(size: int, dtype: torch.dtype, device: str) -> None:
    weight = torch.randn(40, size, generator=torch.Generator().manual_seed(size)).to(device, dtype)
    input_ids, latest_tokens = (torch.tensor(each, device=device) for each in ([39, ~2, 0, ~0], [5, 6, 38]))
    outs = [torch.full((4, size), torch.nan, device=device, dtype=dtype) for _ in range(2)]
    for run, out in zip((triton_ops().embed, plain.embed), outs, strict=True):
        run(input_ids, latest_tokens, weight, out)
        assert torch.equal(out, weight[[39, 38, 0, 5]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size", "has_residual"), [(1, 16, True), (5, 100, False), (3, 576, True)])
def test_add_rms_norm_matches_plain_torch(
    rows: int, size: int, has_residual: bool, dtype: torch.dtype, device: str
) -> None:
    generator = torch.Generator().manual_seed(size)
    x, residual = (torch.randn(rows, size, generator=generator).to(device, dtype) for _ in range(2))
    weight = (1 + torch.randn(size, generator=generator) / 4).to(device, dtype)
    residuals = [residual.clone() if has_residual else None for _ in range(2)]
    outs = [torch.full_like(x, torch.nan) for _ in range(2)]
    for run, sums, out in zip((triton_ops().add_rms_norm, plain.add_rms_norm), residuals, outs, strict=True):
        run(x, sums, weight, 1e-5, out)
    torch.testing.assert_close(*outs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if has_residual:
        assert torch.equal(*residuals) and not torch.equal(residuals[0], residual)


def test_add_rms_norm_works_in_place(device: str) -> None:
    x, weight = torch.randn(4, 40, device=device), torch.randn(40, device=device)
    expected = plain.rms_norm(x, weight, 1e-5)
    triton_ops().add_rms_norm(x, None, weight, 1e-5, x)
    torch.testing.assert_close(x, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # exp(100) is inf, as it should be
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (3, 1025), (2, 2048)])  # 1024 outputs per program
def test_silu_and_mul_matches_plain_torch(rows: int, size: int, dtype: torch.dtype, device: str) -> None:
    gate_up = torch.randn(rows, 2 * size, generator=torch.Generator().manual_seed(size)) * 4
    gate_up[0, :2] = torch.tensor([-100.0, 100.0])  # exp(100) overflows float32
    gate_up = gate_up.to(device, dtype)
    outs = [torch.full((rows, size), torch.nan, device=device, dtype=dtype) for _ in range(2)]
    for run, out in zip((triton_ops().silu_and_mul, plain.silu_and_mul), outs, strict=True):
        run(gate_up, out)
    torch.testing.assert_close(*outs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


# Rotation and the write to the pool

SHAPES = [  # with or without norms of heads
    (KernelShape(1, 1, 16, 1, FLOAT), False),
    (KernelShape(2, 4, 64, 16, BRAIN), True),
    (KernelShape(2, 8, 128, 128, HALF), False),
    (KernelShape(3, 3, 24, 3, FLOAT), True),
    (KernelShape(2, 5, 80, 16, BRAIN), False),
    (KernelShape(1, 7, 256, 3, HALF), True),
]
MAX_MODEL_LEN, LAYER = 300, 1


def make_step(shape: KernelShape, has_norms: bool, device: str) -> tuple[dict[str, Any], torch.Tensor]:
    """Return an unwritten pool, and the other arguments of rotate_and_write() for 6 rows, two of them padding."""
    generator = torch.Generator().manual_seed(shape.head_dim)
    num_slots = 5 * shape.block_size
    slots = torch.randperm(num_slots, generator=generator)[:6].tolist() + [0] * 6
    slots = [slots[0], -1, *slots[1:4], -1]
    positions = [299, 10**9, 0, 17, 128, 0]  # a padding row may have any position
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
    return arguments, as_stored(torch.full(pool, 7, dtype=shape.dtype), shape.kv_cache_dtype).to(device)


@pytest.mark.parametrize(("shape", "has_norms"), SHAPES)
def test_rotate_and_write_matches_plain_torch(shape: KernelShape, has_norms: bool, device: str) -> None:
    arguments, unwritten = make_step(shape, has_norms, device)
    pools, outs = [], []
    for run in (triton_ops().rotate_and_write, plain.rotate_and_write):
        pools.append(unwritten.clone())
        outs.append(torch.full((6, shape.group * shape.num_kv_heads, shape.head_dim), 7).to(unwritten))
        run(**arguments, blocks=pools[-1], q_out=outs[-1])
    # Without norms a 16-bit result is exact: a sum of squares depends on its order, a rotation doesn't.
    tolerance = TOLERANCE[shape.dtype] if has_norms or shape.dtype == FLOAT else 0
    torch.testing.assert_close(*outs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(*pools, rtol=tolerance, atol=tolerance)
    assert torch.equal(pools[0] == 7, pools[1] == 7), "the kernel wrote to other slots"
    assert not outs[0][1].any() and not outs[0][5].any(), "queries of padding rows must be zeros"


@pytest.mark.parametrize(("kv_cache_dtype", "head_dim"), [("fp8", 24), ("fp8", 128), ("int8", 80), ("int8", 64)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate_and_write_rounds_to_8_bits_like_plain_torch(
    kv_cache_dtype: str, head_dim: int, dtype: torch.dtype, device: str
) -> None:
    shape = KernelShape(2, 3, head_dim, 4, dtype, kv_cache_dtype)
    arguments, unwritten = make_step(shape, False, device)
    arguments["qkv"][0, -1] = 1e4  # too large for fp8
    arguments["qkv"][2, -1] = 0  # the scale of zeros
    pools, q_out = [], arguments["qkv"].new_empty(6, 6, head_dim)
    for run in (triton_ops().rotate_and_write, plain.rotate_and_write):
        pools.append(unwritten.clone())
        run(**arguments, blocks=pools[-1], q_out=q_out)
    kernel, expected = (pool.view(torch.uint8) for pool in pools)
    if device == "cpu" and dtype != FLOAT:  # rotations in float32 differ in the last bit
        assert torch.equal(kernel, expected)
    assert (kernel != expected).float().mean() < 1e-3 and not torch.equal(expected, unwritten.view(torch.uint8))


@pytest.mark.parametrize(("shape", "has_norms"), SHAPES)
def test_plain_rotate_and_write_matches_the_model_bit_for_bit(shape: KernelShape, has_norms: bool) -> None:
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


# Linear layers for one row


@pytest.fixture
def set_height(device: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that fixes the number of outputs per program."""
    from ...backends.gpu import layer_kernels

    return lambda height: monkeypatch.setattr(layer_kernels, "outputs_per_program", lambda _: height)


def check_linear(
    name: str,
    size: int,
    outputs: int,
    has_bias: bool,
    dtype: torch.dtype,
    device: str,
    norms: Sequence[plain.NormBefore | None] = (None, None),
) -> None:
    generator, height = torch.Generator().manual_seed(size), 2 * outputs if name == "gated_gemv" else outputs
    x = torch.randn(1, size, generator=generator).to(device, dtype)
    weight = (torch.randn(height, size, generator=generator) / size**0.5).to(device, dtype)
    bias = torch.randn(height, generator=generator).to(device, dtype) if has_bias else None
    outs = [torch.full((1, outputs), torch.nan, device=device, dtype=dtype) for _ in range(2)]
    for ops, out, norm in zip((triton_ops(), plain), outs, norms, strict=True):
        getattr(ops, name)(x, weight, bias, out, norm)
    torch.testing.assert_close(*outs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "outputs", "height", "has_bias"),  # no tile divides these sizes
    [(16, 5, 1, True), (576, 37, 8, False), (5000, 6, 2, True), (70, 41, 4, True)],
)
def test_gemv_matches_plain_torch(
    size: int, outputs: int, height: int, has_bias: bool, dtype: torch.dtype, device: str, set_height: Any
) -> None:
    set_height(height)
    check_linear("gemv", size, outputs, has_bias, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "outputs", "height", "has_bias"), [(16, 5, 1, True), (576, 37, 8, False), (5000, 6, 2, True)]
)
def test_gated_gemv_matches_plain_torch(
    size: int, outputs: int, height: int, has_bias: bool, dtype: torch.dtype, device: str, set_height: Any
) -> None:
    set_height(height)
    check_linear("gated_gemv", size, outputs, has_bias, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gemv", "gated_gemv"])
@pytest.mark.parametrize(("size", "height", "has_bias"), [(16, 1, True), (576, 8, False), (5000, 2, True)])
def test_gemv_after_a_norm_matches_plain_torch(
    name: str, size: int, height: int, has_bias: bool, dtype: torch.dtype, device: str, set_height: Any
) -> None:
    set_height(height)
    generator = torch.Generator().manual_seed(size)
    residual, weight = (torch.randn(1, size, generator=generator).to(device, dtype) for _ in range(2))
    totals = [torch.full_like(residual, torch.nan) for _ in range(2)]
    norms = [plain.NormBefore(residual, total, weight[0], 1e-5) for total in totals]
    check_linear(name, size, 37, has_bias, dtype, device, norms)
    assert torch.equal(*totals)


def test_gemv_rejects_more_than_one_row(device: str) -> None:
    x, weight = torch.zeros(2, 16, device=device), torch.zeros(8, 16, device=device)
    with pytest.raises(AssertionError, match="2, 16"):
        triton_ops().gemv(x, weight, None, torch.empty(2, 8, device=device))
