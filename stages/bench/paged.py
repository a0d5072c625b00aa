"""The cost of blocks in a decode step's attention: the same memory as a paged cache and as a contiguous one.

    blocks of 16     [num_blocks, num_layers, 2, 16, num_kv_heads, head_dim], and block tables in random order
    contiguous       the same with one block per sequence: its keys are in one piece, and the same kernel reads them
    sdpa             the contiguous one, read by torch's scaled_dot_product_attention
    varlen           blocks of 256, the least that torch's varlen_attn takes, read by it: on a GPU, from torch 2.12 on

On a GPU all layers are one CUDA graph, so that launching kernels costs next to nothing, as in a step of the engine.
"""

import inspect
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from nanovllm.backends.gpu import plain
from nanovllm.backends.gpu.backend import num_multiprocessors
from nanovllm.backends.gpu.capture import CudaCapture
from nanovllm.backends.gpu.model import seconds_on_gpu
from nanovllm.backends.gpu.ops import PLAIN, Ops, triton_ops
from nanovllm.backends.gpu.plain import DecodeMetadata
from nanovllm.backends.gpu.tiles import DecodeWorkspace, choose_splits
from nanovllm.bench.bench_options import whole_numbers
from nanovllm.bench.floor import device_bandwidth
from nanovllm.bench.harness import ratio, take_turns, timed
from nanovllm.bench.report import Report, failure_reported, machine_of, report_of
from nanovllm.checkpoints.sizes import SHAPES, Shape
from nanovllm.engine.block_manager import cdiv
from nanovllm.options.config import EngineConfig, default_device
from stages.bench.options import Paged

CONTIGUOUS, SDPA, VARLEN = "contiguous", "sdpa", "varlen"
VARLEN_BLOCK_SIZE = 256
LEAST_BYTES = 1 << 28  # of keys and values: more than a GPU's caches hold
MOST_BYTES = 1 << 35
MOST_BYTES_ON_CPU = 1 << 30
MAX_DIFFERENCE = 0.03  # as a share of the largest number: bfloat16 rounds by 0.004


def paged(options: Paged) -> Report:
    """Measure all batches at all contexts. Raise ValueError for a context that is not a multiple of a block size."""
    block_sizes = whole_numbers("--block-sizes", options.block_sizes)
    contexts = whole_numbers("--contexts", options.contexts)
    batches = whole_numbers("--batch-sizes", options.batch_sizes)
    for context, block_size in product(contexts, block_sizes):
        if context % block_size:
            raise ValueError(f"--contexts must be multiples of each block size, got {context} for {block_size}")
    config = EngineConfig(device=options.device or default_device(), dtype=options.dtype or "auto")
    device, dtype = config.torch_device(), config.torch_dtype("bfloat16")
    if device.index is not None:
        torch.cuda.set_device(device)
    shape, ops = SHAPES[options.shape], triton_ops() if device.type == "cuda" else PLAIN
    cases = [Case(shape, 1, batch, context, dtype, device) for context in contexts for batch in batches]
    measured, failures = measure_cases(cases, ops, block_sizes, options.layers, options.rounds)
    kernels = "plain operations, whose times say nothing about a GPU's kernels" if ops is PLAIN else "Triton's kernels"
    named = {"shape": options.shape, "layers": options.layers or "as they fit", "rounds": options.rounds}
    says = [
        *failures,
        f"sequences x tokens of each; attention of one new token each, by {kernels}",
        "sdpa: torch's scaled_dot_product_attention, on the contiguous cache",
        *(["varlen: torch's varlen_attn, on blocks of 256, with one split"] if VARLEN in measured else []),
        "blocks are in random order; contiguous: one block per sequence; ratios: median / least / largest",
    ]
    where = machine_of(device) | {"dtype": str(dtype).removeprefix("torch.")}
    return report_of("paged", named, where, measured, says)


class Case(NamedTuple):
    """Sequences of one length, in all layers."""

    shape: Shape
    num_layers: int
    batch_size: int
    context: int
    dtype: torch.dtype
    device: torch.device

    @property
    def name(self) -> str:
        return f"{self.batch_size} x {self.context:,}"

    @property
    def layer_bytes(self) -> int:
        """The bytes of one layer's keys and values."""
        heads, size = self.shape.num_key_value_heads, self.shape.head_dim
        return 2 * self.batch_size * self.context * heads * size * self.dtype.itemsize

    def fitted(self, num_layers: int | None) -> "Case":
        """Return the case with `num_layers` layers, or as many as fit.

        None means the shape's own number, or more if caches could hold them all. Raise ValueError if none fits.
        """
        room = MOST_BYTES_ON_CPU
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # otherwise the previous case's memory would not count as free
            room = min(MOST_BYTES, torch.cuda.mem_get_info(self.device)[0] // 2)
        if self.layer_bytes > room:
            raise ValueError(f"a layer's keys and values need {self.layer_bytes:,} bytes, got {room:,}")
        most = num_layers or max(self.shape.num_hidden_layers, cdiv(LEAST_BYTES, self.layer_bytes))
        return self._replace(num_layers=min(most, room // self.layer_bytes))

    def memory(self) -> Tensor:
        """Return random keys and values, [num_layers * layer_bytes / itemsize]."""
        count = self.num_layers * self.layer_bytes // self.dtype.itemsize
        generator = torch.Generator(self.device).manual_seed(0)
        return torch.empty(count, dtype=self.dtype, device=self.device).normal_(generator=generator)


class Way(NamedTuple):
    """A call that goes through all layers, and the cache that it reads."""

    call: Callable[[], None]
    blocks: Tensor  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    block_tables: Tensor  # int32 [batch_size, context / block_size]


class Attention:
    """All ways on one memory. The output of the last call's last layer stays in `out`."""

    def __init__(self, case: Case, ops: Ops) -> None:
        self._case, self._ops, self._memory = case, ops, case.memory()
        shape, device = case.shape, case.device
        heads, size = shape.num_attention_heads, shape.head_dim
        splits = choose_splits(case.batch_size, shape.num_key_value_heads, num_multiprocessors(device))
        self._room = DecodeWorkspace(case.batch_size, heads, size, splits, device)
        self._q = torch.randn(case.batch_size, heads, size, dtype=case.dtype, device=device)
        self._context_lens = torch.full((case.batch_size,), case.context, dtype=torch.int32, device=device)
        self._numbers = torch.arange(case.batch_size, dtype=torch.int32, device=device)
        self.out = torch.empty_like(self._q)  # [batch_size, num_heads, head_dim]

    def paged(self, block_size: int) -> Way:
        """Return the kernel on blocks of this size. Each block is in one table, in random order."""
        blocks = self._blocks(block_size)
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0)).int()  # [num_blocks]
        tables = order.view(self._case.batch_size, -1).to(self._case.device)
        decodes = DecodeMetadata(tables, self._context_lens, self._room, self._numbers, self._numbers)

        def call() -> None:
            for layer in range(self._case.num_layers):
                self._ops.paged_decode(self._q, blocks, layer, decodes, self.out)

        return Way(call, blocks, tables)

    def sdpa(self) -> Way:
        """Return torch's attention on the contiguous cache. Sequence i is in block i."""
        blocks, q = self._blocks(self._case.context), self._q.unsqueeze(2)  # q [batch_size, num_heads, 1, head_dim]

        def call() -> None:
            for layer in range(self._case.num_layers):
                k, v = (blocks[:, layer, i].transpose(1, 2) for i in (0, 1))  # [batch_size, num_kv_heads, context, ...]
                self.out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).squeeze(2)

        return Way(call, blocks, torch.arange(len(blocks), dtype=torch.int32, device=q.device)[:, None])

    def varlen(self) -> Way:
        """Return torch's paged attention. More than one split of a context gave wrong results (pytorch#194167)."""
        case, (_, blocks, tables) = self._case, self.paged(VARLEN_BLOCK_SIZE)
        starts = torch.arange(case.batch_size + 1, dtype=torch.int32, device=case.device)  # of each query
        options: dict[str, Any] = {"seqused_k": self._context_lens, "block_table": tables}
        options |= {"enable_gqa": True, "num_splits": 1}

        def call() -> None:
            for layer in range(case.num_layers):
                k, v = blocks[:, layer, 0], blocks[:, layer, 1]  # [num_blocks, 256, num_kv_heads, head_dim] each
                out = varlen_attn(self._q, k, v, starts, None, 1, case.context, **options)
                assert isinstance(out, Tensor), "without return_aux there is no second result"
                self.out = out

        return Way(call, blocks, tables)

    def check(self, way: Way) -> None:
        """Compare the first row of `out` with plain operations. Raise ValueError if it differs."""
        layer, expected = self._case.num_layers - 1, torch.empty_like(self.out[:1])
        given = self._context_lens[:1], self._room, self._numbers[:1], self._numbers[:1]
        plain.paged_decode(self._q[:1], way.blocks, layer, DecodeMetadata(way.block_tables[:1], *given), expected)
        difference = ((self.out[:1] - expected).abs().max() / expected.abs().max()).item()
        if not difference <= MAX_DIFFERENCE:
            raise ValueError(f"the result differs from plain operations by {difference:.2g} of the largest number")

    def _blocks(self, block_size: int) -> Tensor:
        """Return the memory as [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]."""
        case = self._case
        heads, size = case.shape.num_key_value_heads, case.shape.head_dim
        return self._memory.view(-1, case.num_layers, 2, block_size, heads, size)


def has_varlen(case: Case) -> bool:
    """Return whether torch's varlen_attn can read this case's blocks."""
    takes_tables = "block_table" in inspect.signature(varlen_attn).parameters  # torch 2.11 has none
    is_possible = case.device.type == "cuda" and case.dtype.itemsize == 2 and case.context % VARLEN_BLOCK_SIZE == 0
    return takes_tables and is_possible


@torch.inference_mode()
def measure_cases(
    cases: Sequence[Case], ops: Ops, block_sizes: Sequence[int], layers: int | None, rounds: int
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the numbers of each way that works, and a line for each failure."""
    measured, failures = defaultdict[str, dict[str, Any]](dict), list[str]()
    for case in cases:
        with failure_reported(case.name, failures):
            fitted, calls = case.fitted(layers), dict[str, Callable[[], float]]()
            bandwidth, attention = device_bandwidth(case.device), Attention(fitted, ops)
            sizes = {f"blocks of {size}": size for size in block_sizes} | {CONTIGUOUS: case.context}
            ways = {name: attention.paged(size) for name, size in sizes.items()} | {SDPA: attention.sdpa()}
            if has_varlen(case):
                ways[VARLEN] = attention.varlen()
            for name, way in ways.items():
                with failure_reported(f"{case.name}, {name}", failures):
                    way.call()  # compiles the kernels, before a graph records them
                    attention.check(way)
                    is_cuda = case.device.type == "cuda"
                    calls[name] = partial(seconds_on_gpu, CudaCapture()(way.call)) if is_cuda else timed(way.call)
            results = take_turns(calls, rounds, title=case.name)
            for name in calls:
                measured[name] |= numbers_of(fitted, name, results, bandwidth)
    return measured, failures


def numbers_of(case: Case, name: str, results: Sequence[dict[str, float]], bandwidth: float) -> dict[str, Any]:
    """Return medians of the rounds, and the spread of ratios."""
    seconds = statistics.median(each[name] for each in results) / case.num_layers
    share = case.layer_bytes / seconds / bandwidth
    numbers: dict[str, Any] = {"us per layer": 1e6 * seconds, "share of the bandwidth": share}
    if name != CONTIGUOUS and CONTIGUOUS in results[0]:
        numbers[f"time over {CONTIGUOUS}"] = ratio(results, name, CONTIGUOUS)._asdict()
    return {f"{case.name}: {key}": value for key, value in numbers.items()}
