"""FusedModel: a LlamaModel with four matmuls per layer, and five kernels between them.

    residual += x, norm             one kernel instead of seven operations; for a single row, qkv_proj may include it
    qkv_proj
    norms of q and k, rotation      one kernel instead of a dozen operations; it also copies keys and values to the pool
    attention
    o_proj
    residual += x, norm
    gate_up_proj
    silu(gate) * up                 one kernel; for a single row, gate_up_proj may include it
    down_proj

The weights, and the modules that hold them, belong to the plain model.

LinearDispatch decides how each matmul runs. A step of few rows uses each weight in few multiplications, so memory
bandwidth is its limit. How close torch's matmul comes to that limit depends on the shape, the GPU and the version of
cuBLAS. So the engine times each shape when it starts, for 1, 16, 32 and 64 rows, and picks torch's matmul or a kernel:
gemv for one row, and otherwise gemm. For one row, gemv can also compute the norm before the layer, which saves a
launch. This variant is timed too. Quantized weights are multiplied by gemm alone. A layer that is divided among ranks
computes its part, and then adds up or gathers the parts.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...llama.model import LlamaAttention, LlamaDecoderLayer, LlamaModel, RMSNorm
from ...quantization import MixedLinear, QuantizedLinear
from .attention import KernelAttend
from .capture import Capture, Launcher
from .ops import Ops
from .plain import NormBefore, fill_placeholders
from .tiles import ROW_TILES, row_tile

REPEATS = 5  # the fastest one counts
MAX_TIME_RATIO = 0.97  # gemv must save 3% of the time; otherwise near ties would be decided at random
MatmulShape = tuple[int | None, int, int]  # row_tile() of the rows of x, outputs, size of a row
Timer = Callable[[Launcher], float]  # returns how many seconds the device takes for a step


class LinearDispatch:
    """A callable that computes linear layers, with kernels where choose() found them faster, or with torch's matmul."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.kernel_shapes: set[MatmulShape] = set()
        self.normed_shapes: set[MatmulShape] = set()  # shapes where gemv also computes the norm before it

    def __call__(self, layer: nn.Linear, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return layer(x), [rows, outputs], written to `out` if given. x is [rows, size]."""
        if not (isinstance(layer, QuantizedLinear) or is_whole(layer)):
            # each format has its own product; ranks add up or gather their parts
            result: Tensor = layer(x, self) if isinstance(layer, MixedLinear) else layer(x)
            return result if out is None else out.copy_(result)
        out = x.new_empty(len(x), layer.out_features) if out is None else out
        if isinstance(layer, QuantizedLinear):
            self._ops.gemm(x, layer, out)
        else:
            self._multiply(shape_of(layer, len(x)) in self.kernel_shapes, layer, x, out)
        return out

    def gated(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """Return silu(gate) * up of layer(x), [rows, outputs / 2]. x is [rows, size]."""
        out = x.new_empty(len(x), layer.out_features // 2)
        if len(x) == 1 and shape_of(layer, 1) in self.kernel_shapes:
            self._ops.gated_gemv(x, layer.weight, layer.bias, out)
        else:
            self._ops.silu_and_mul(self(layer, x), out)
        return out

    def after_norm(
        self, layer: nn.Linear, norm: RMSNorm, x: Tensor | None, residual: Tensor, is_gated: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Add x, if any, to the residual, normalize the sum, apply the layer, and return its result and the sum.

        The sum may overwrite the residual.

        x, residual and the sum are [rows, size]; the result is [rows, outputs], or if gated [rows, outputs / 2].
        """
        if x is None or shape_of(layer, len(x)) not in self.normed_shapes:
            normed = self.norm(x, residual, norm)
            return self.gated(layer, normed) if is_gated else self(layer, normed), residual
        out = x.new_empty(1, len(layer.weight) // (2 if is_gated else 1))
        before = NormBefore(residual, torch.empty_like(residual), norm.weight, norm.eps)
        gemv = self._ops.gated_gemv if is_gated else self._ops.gemv
        gemv(x, layer.weight, layer.bias, out, before)
        return out, before.total

    def norm(self, x: Tensor | None, residual: Tensor, norm: RMSNorm, out: Tensor | None = None) -> Tensor:
        """Add x, if any, to `residual` in place, and return the norm of the sum. All are [num_tokens, hidden_size]."""
        out = torch.empty_like(residual) if out is None else out
        if x is None:
            self._ops.add_rms_norm(residual, None, norm.weight, norm.eps, out)
        else:
            self._ops.add_rms_norm(x, residual, norm.weight, norm.eps, out)
        return out

    def choose(
        self, layers: list[nn.Linear], normed: "list[NormedLinear]", max_rows: int, capture: Capture, timer: Timer
    ) -> None:
        """Time the kernels and torch's matmul for each shape, in graphs, as a decode step of that many rows runs them.

        One pass runs all layers of a shape in turn, so each weight has left the GPU's cache before its next use. If
        gemv wins for one row, the layers in `normed` are timed again, with the norm in gemv and in its own kernel.
        """

        def seconds(one_pass: Launcher) -> float:
            one_pass()  # compile kernels before the capture
            replay = capture(one_pass, shares_memory=False)  # this graph isn't kept
            return min(timer(replay) for _ in range(REPEATS))

        for rows in sorted({min(tile, max_rows) for tile in ROW_TILES}):
            for shape in {layer.weight.shape: None for layer in layers}:
                same_shape = [layer for layer in layers if layer.weight.shape == shape]
                x = same_shape[0].weight.new_zeros(rows, shape[1])
                one_pass = partial(self._multiply_all, same_shape, x, x.new_empty(rows, shape[0]))
                matmul_time, kernel_time = (seconds(partial(one_pass, uses_kernel)) for uses_kernel in (False, True))
                if kernel_time < MAX_TIME_RATIO * matmul_time:
                    self.kernel_shapes.add((row_tile(rows), *shape))
        for row_shape in sorted(shape for shape in self.kernel_shapes if shape[0] == 1):
            if after_norms := [each for each in normed if each.layer.weight.shape == row_shape[1:]]:
                x = after_norms[0].layer.weight.new_zeros(1, row_shape[2])
                separate_time = seconds(partial(self._multiply_after_norms, after_norms, x))
                self.normed_shapes.add(row_shape)
                if seconds(partial(self._multiply_after_norms, after_norms, x)) >= MAX_TIME_RATIO * separate_time:
                    self.normed_shapes.remove(row_shape)

    def _multiply_all(self, layers: list[nn.Linear], x: Tensor, out: Tensor, uses_kernel: bool) -> None:
        for layer in layers:
            self._multiply(uses_kernel, layer, x, out)

    def _multiply_after_norms(self, layers: "list[NormedLinear]", x: Tensor) -> None:
        for layer, norm, is_gated in layers:
            self.after_norm(layer, norm, x, x, is_gated)

    def _multiply(self, uses_kernel: bool, layer: nn.Linear, x: Tensor, out: Tensor) -> None:
        if uses_kernel and len(x) == 1:
            self._ops.gemv(x, layer.weight, layer.bias, out)
        elif uses_kernel:
            self._ops.gemm(x, layer, out)
        elif layer.bias is None:
            torch.mm(x, layer.weight.t(), out=out)
        else:
            torch.addmm(layer.bias, x, layer.weight.t(), out=out)


def is_whole(layer: nn.Module) -> bool:
    """Return whether a layer is only a product with a weight in floating point."""
    return type(layer) is nn.Linear


def shape_of(layer: nn.Linear, rows: int) -> MatmulShape | None:
    """Return the shape of a layer's product, or None if it is not only that."""
    return (row_tile(rows), layer.out_features, layer.in_features) if is_whole(layer) else None


class NormedLinear(NamedTuple):
    """A linear layer, and the norm before it."""

    layer: nn.Linear
    norm: RMSNorm
    is_gated: bool


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    return [each for each in model.modules() if isinstance(each, nn.Linear) and is_whole(each)]


def seconds_on_gpu(step: Launcher) -> float:
    """Run a step on the current CUDA device, and return the seconds it takes there."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    end.synchronize()
    seconds: float = start.elapsed_time(end) / 1000
    return seconds


class FusedModel(nn.Module):
    """A LlamaModel's forward pass with fused kernels. It shares the model's layers and leaves the model unchanged."""

    def __init__(self, plain: LlamaModel, linears: LinearDispatch, ops: Ops, latest_tokens: Tensor) -> None:
        """Replace placeholders among token ids with tokens from `latest_tokens`, int64 [max_rows]."""
        super().__init__()
        self.plain, self._linears, self._ops, self._latest_tokens = plain, linears, ops, latest_tokens
        self._layers = [layer for layer in plain.layers if isinstance(layer, LlamaDecoderLayer)]
        assert len(self._layers) == len(plain.layers), "every layer must be a LlamaDecoderLayer"

    def forward(self, input_ids: Tensor, positions: Tensor, attend: KernelAttend, out: Tensor | None = None) -> Tensor:
        """Return the hidden states, [num_tokens, hidden_size], written to `out` if given.

        input_ids, positions int64 [num_tokens]
        """
        residual = self._embed(input_ids)  # [num_tokens, hidden_size]
        x: Tensor | None = None  # the latest layer's output, not yet added to the residual
        for layer in self._layers:
            attention, mlp = layer.self_attn, layer.mlp
            qkv, residual = self._linears.after_norm(attention.qkv_proj, layer.input_layernorm, x, residual)
            x = self._attention(attention, qkv, positions, attend)
            norm = layer.post_attention_layernorm
            gated, residual = self._linears.after_norm(mlp.gate_up_proj, norm, x, residual, is_gated=True)
            x = self._linears(mlp.down_proj, gated)
        return self._linears.norm(x, residual, self.plain.norm, out)

    def _embed(self, input_ids: Tensor) -> Tensor:
        embedding = self.plain.embed_tokens
        if type(embedding) is not nn.Embedding:  # quantized, or divided among ranks
            result: Tensor = embedding(fill_placeholders(input_ids, self._latest_tokens))
            return result
        out = embedding.weight.new_empty(len(input_ids), embedding.embedding_dim)
        self._ops.embed(input_ids, self._latest_tokens, embedding.weight, out)
        return out

    def normed_linears(self) -> list[NormedLinear]:
        """Return the linear layers that follow a norm, and are not quantized."""
        layers = self._layers
        normed = [NormedLinear(each.self_attn.qkv_proj, each.input_layernorm, False) for each in layers]
        normed += [NormedLinear(each.mlp.gate_up_proj, each.post_attention_layernorm, True) for each in layers]
        return [each for each in normed if is_whole(each.layer)]

    def _attention(self, attention: LlamaAttention, qkv: Tensor, positions: Tensor, attend: KernelAttend) -> Tensor:
        qkv = qkv.unflatten(1, (-1, attention.head_dim))  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
        norms = (attention.q_norm, attention.k_norm) if attention.qk_norm else (None, None)
        return self._linears(attention.o_proj, attend(attention.layer, qkv, positions, *norms).flatten(1))
