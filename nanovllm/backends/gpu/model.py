"""FusedModel: a LlamaModel with four matmuls per layer, and five kernels between them.

    residual += x, norm             one kernel instead of seven operations
    qkv_proj
    norm of heads, rotation, write  one kernel instead of a dozen operations and the copy into the pool
    attention
    o_proj
    residual += x, norm
    gate_up_proj
    silu(gate) * up                 one kernel; for a single row, part of gate_up_proj's
    down_proj

The weights, and the modules that hold them, belong to the plain model.

LinearDispatch decides how each matmul runs. A step of one row uses each weight in a single multiplication, so memory
bandwidth sets its pace. How close a library's matmul comes depends on the shape, the GPU and the library's version.
Rather than encode a rule, the engine times each shape when it starts, and takes gemv or the library.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...llama.model import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaModel, RMSNorm
from .attention import KernelAttend
from .graphs import Capture, Launcher
from .ops import MAX_GEMV_ROWS, Ops

REPEATS = 5
MAX_TIME_RATIO = 0.97  # gemv must be this much faster, or equally fast choices would vary from start to start
MatmulShape = tuple[int, int, int]  # rows of x, outputs, size of a row
Timer = Callable[[Launcher], float]  # returns the seconds that the device takes for a step


class LinearDispatch:
    """A function that computes linear layers, by the library's matmul until choose() has timed gemv."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.gemv_shapes: set[MatmulShape] = set()

    def __call__(self, layer: nn.Linear, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return layer(x), [rows, outputs], written to `out` if given. x is [rows, size]."""
        out = x.new_empty(len(x), len(layer.weight)) if out is None else out
        self._multiply((len(x), *layer.weight.shape) in self.gemv_shapes, layer, x, out)
        return out

    def gated(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """Return silu(gate) * up of layer(x), [rows, outputs / 2]. x is [rows, size]."""
        out = x.new_empty(len(x), len(layer.weight) // 2)
        if len(x) == 1 and (1, *layer.weight.shape) in self.gemv_shapes:
            self._ops.gated_gemv(x, layer.weight, layer.bias, out)
        else:
            self._ops.silu_and_mul(self(layer, x), out)
        return out

    def choose(self, layers: list[nn.Linear], sizes: list[int], capture: Capture, timer: Timer) -> None:
        """Time gemv and the library's matmul for each shape, in graphs, where a launch costs next to nothing.

        One pass runs all layers of a shape in turn, so each weight has left the GPU's cache before its next use.
        """
        groups: dict[torch.Size, list[nn.Linear]] = {}
        for layer in layers:
            groups.setdefault(layer.weight.shape, []).append(layer)
        for rows in (size for size in sizes if size <= MAX_GEMV_ROWS):
            for shape, group in groups.items():
                x = group[0].weight.new_zeros(rows, shape[1])
                library, gemv = (self._seconds(uses_gemv, group, x, capture, timer) for uses_gemv in (False, True))
                if gemv < MAX_TIME_RATIO * library:
                    self.gemv_shapes.add((rows, *shape))

    def _multiply(self, uses_gemv: bool, layer: nn.Linear, x: Tensor, out: Tensor) -> None:
        if uses_gemv:
            self._ops.gemv(x, layer.weight, layer.bias, out)
        elif layer.bias is None:
            torch.mm(x, layer.weight.t(), out=out)
        else:
            torch.addmm(layer.bias, x, layer.weight.t(), out=out)

    def _seconds(self, uses_gemv: bool, group: list[nn.Linear], x: Tensor, capture: Capture, timer: Timer) -> float:
        """Return the time of the fastest of several passes through the layers, in seconds."""
        out = x.new_empty(len(x), len(group[0].weight))

        def one_pass() -> None:
            for layer in group:
                self._multiply(uses_gemv, layer, x, out)

        one_pass()  # compile kernels before the capture
        replay = capture(one_pass, shares_memory=False)  # this graph isn't kept
        return min(timer(replay) for _ in range(REPEATS))


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    return [each for each in model.modules() if isinstance(each, nn.Linear)]


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

    def __init__(self, plain: LlamaModel, ops: Ops, linears: LinearDispatch) -> None:
        super().__init__()
        self.plain, self._ops, self._linears = plain, ops, linears
        self._layers = [layer for layer in plain.layers if isinstance(layer, LlamaDecoderLayer)]
        assert len(self._layers) == len(plain.layers), "a layer of another class"

    def forward(self, input_ids: Tensor, positions: Tensor, attend: KernelAttend) -> Tensor:
        """Return the hidden states, [num_tokens, hidden_size]. `input_ids` and `positions` are int64 [num_tokens]."""
        residual = self.plain.embed_tokens(input_ids)  # [num_tokens, hidden_size]
        x: Tensor | None = None  # not yet added to the residual
        for layer in self._layers:
            x = self._attention(layer.self_attn, self._norm(x, residual, layer.input_layernorm), positions, attend)
            x = self._mlp(layer.mlp, self._norm(x, residual, layer.post_attention_layernorm))
        return self._norm(x, residual, self.plain.norm)

    def _norm(self, x: Tensor | None, residual: Tensor, norm: RMSNorm) -> Tensor:
        """Add x to `residual` in place, and return the norm of the sum. All are [num_tokens, hidden_size]."""
        out = torch.empty_like(residual)
        if x is None:
            self._ops.add_rms_norm(residual, None, norm.weight, norm.eps, out)
        else:
            self._ops.add_rms_norm(x, residual, norm.weight, norm.eps, out)
        return out

    def _attention(self, attention: LlamaAttention, x: Tensor, positions: Tensor, attend: KernelAttend) -> Tensor:
        qkv = self._linears(attention.qkv_proj, x)
        qkv = qkv.unflatten(1, (-1, attention.head_dim))  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
        norms = (attention.q_norm, attention.k_norm) if attention.qk_norm else (None, None)
        return self._linears(attention.o_proj, attend(attention.layer, qkv, positions, *norms).flatten(1))

    def _mlp(self, mlp: LlamaMLP, x: Tensor) -> Tensor:
        return self._linears(mlp.down_proj, self._linears.gated(mlp.gate_up_proj, x))
