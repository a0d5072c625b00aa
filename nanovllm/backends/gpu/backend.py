"""TritonBackend: decode steps as CUDA graphs, other steps kernel by kernel, sampling on the device.

GpuChoice builds it when an engine starts. If that fails, GpuChoice tries again without graphs, and then keeps plain
operations.
"""

import math
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.metadata import version
from typing import Protocol

import torch
from torch import Tensor

from ...distributed.rank_group import RankError, RankGroup
from ...engine.executor import Kernels, Scheduled
from ...engine.kv_cache import KVCache
from ...engine.sequence import Sequence
from ...llama import LlamaForCausalLM
from ...quantization import QuantizedLinear
from ...requests.tokens import SamplingRow, StepOutput
from ..torch.attention import AttentionMetadata
from ..torch.backend import Backend, Computed, SamplerAhead, flatten
from ..torch.model_runner import ModelRunner, sampling_rows
from .attention import KernelAttention, KernelContext
from .capture import Capture, CudaCapture
from .graphs import DecodeGraphs, DecodeOutput, buckets
from .inputs import NO_SLOT, SAMPLING_FIELDS, allocate_fields, field_views, sampling_params
from .model import REPEATS, FusedModel, LinearDispatch, Timer, linear_layers, seconds_on_gpu
from .ops import PLAIN, Ops, plain_names, triton_ops, with_fallbacks, without_fallbacks
from .plain import DecodeMetadata, PoolSizes
from .sampler import Sampling, params_on_device
from .tiles import PREFILL_ROWS, ROW_TILES, DecodeWorkspace, SamplingWorkspace

DEFAULT_SMS = 132  # multiprocessors of an H100 or H200, assumed on a device that isn't a GPU
OLDEST, OLDEST_WITH_FP8 = (8, 0), (8, 9)  # compute capability: an A100, an L4
TIMED_TOKENS = 2048  # length of the prompt that choose_prefill_rows() times


class TritonBackend:
    """A Backend that runs fused kernels, and CUDA graphs of these kernels.

    It replaces the LlamaModel inside the plain backend's model with a FusedModel; close() puts the LlamaModel back.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: LlamaForCausalLM,
        kv_cache: KVCache,
        max_model_len: int,
        ops: Ops,
        capture: Capture | None,
        max_rows: int,
        timer: Timer | None = None,
        progress: bool = True,
        ranks: RankGroup | None = None,
    ) -> None:
        """Compile all kernels, and capture graphs if `capture` is given. With a `timer`, also choose between kernels.

        Graphs include the communication of `ranks`, and are dropped once these have reconnected.

        Raise any error from compiling or capturing, and leave the model unchanged in that case.
        """
        self._model, self._ops = model, ops
        self._block_size, self._device = kv_cache.block_size, kv_cache.blocks.device
        self._plain_model = model.model
        self._graphs: DecodeGraphs | None = None
        self._ranks = RankGroup() if ranks is None else ranks
        self._num_reconnections = self._ranks.num_reconnections
        self._latest_tokens = torch.zeros(max_rows, dtype=torch.int64, device=self._device)  # by row
        self._decoded: DecodeOutput | None = None  # the latest step's output, if a graph computed it
        rotary, dtype, num_heads = model.model.rotary_emb, kv_cache.dtype, model.config.num_attention_heads
        cos, sin = rotary.cos.to(dtype), rotary.sin.to(dtype)  # [max_model_len, head_dim]
        num_sms, pool = num_multiprocessors(self._device), PoolSizes(kv_cache.block_size, kv_cache.num_kv_heads)
        context = KernelContext(ops, kv_cache.numbers, pool, num_heads, cos, sin, num_sms, PREFILL_ROWS[0])
        self._linears = linears = LinearDispatch(ops)
        fused = FusedModel(model.model, linears, ops, self._latest_tokens)
        model.register_module("model", fused)
        try:
            with on_device(self._device):
                if timer is not None:
                    context = context._replace(prefill_rows=choose_prefill_rows(context, timer))
                self._attention = KernelAttention(context)
                warm_up(model, context, self._attention)
                if capture is not None:
                    sizes = buckets(max_rows)
                    if timer is not None:
                        linears.choose(linear_layers(model), fused.normed_linears(), max_rows, capture, timer)
                    arguments = model, fused, linears, context, max_model_len, sizes
                    self._graphs = DecodeGraphs(*arguments, capture, progress)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._model.model = self._plain_model

    def compute(self, batch: list[Scheduled]) -> Computed:
        self._decoded = None
        if self._num_reconnections != self._ranks.num_reconnections:
            self._graphs = None
        is_decode = all([num_tokens == 1 for _, num_tokens in batch])
        with on_device(self._device):
            if self._graphs is not None and is_decode and len(batch) <= self._graphs.max_rows:
                self._decoded = self._graphs.run(batch)
                return Computed(self._decoded.hidden, list(range(len(batch) + 1)), self._decoded.logits)
            input_ids, positions, step = flatten(batch, self._block_size, self._device)
            hidden: Tensor = self._model(input_ids, positions, self._attention.plan(step))
        return Computed(hidden, step.query_start_loc)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._linears(self._model.lm_head, hidden)

    def sampling(self, computed: Computed) -> AbstractContextManager[None]:
        return on_device(self._device)

    def sample(self, logits: Tensor, rows: list[SamplingRow]) -> StepOutput:
        return self._start(logits, lambda: rows)[1].read() if rows else StepOutput([], [])

    @property
    def ahead(self) -> SamplerAhead:
        return self

    def start_sampling(self, logits: Tensor, seqs: list[Sequence]) -> Callable[[], StepOutput] | None:
        """Start sampling, as SamplerAhead describes. Return None if there are more than `max_rows` sequences."""
        if len(seqs) > len(self._latest_tokens):
            return None
        tokens, sampling = self._start(logits, partial(sampling_rows, seqs))
        self._latest_tokens[: len(seqs)].copy_(tokens)
        return sampling.read

    def _start(self, logits: Tensor, get_rows: Callable[[], list[SamplingRow]]) -> tuple[Tensor, Sampling]:
        """Return the tokens, int64 [num_rows], and the Sampling that reads them. A graph samples its own logits.

        logits [num_rows, vocab_size]
        """
        if self._decoded is not None and self._graphs is not None and logits is self._decoded.logits:
            return self._decoded.tokens, Sampling(self._decoded.sampled)
        rows = get_rows()
        tokens, out = self._latest_tokens.new_empty(len(rows)), logits.new_empty(len(rows), 2, dtype=torch.float32)
        workspace = SamplingWorkspace(len(rows), logits.shape[1], logits.device)
        self._ops.sample_rows(logits, params_on_device(rows, logits.device), workspace, tokens, out)
        return tokens, Sampling(out)


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that launches kernels and graphs on `device`, if it is a GPU.

    A thread's current GPU is 0 by default, and kernels launch there even if their tensors are on another GPU.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def too_old() -> str | None:
    """Return why kernels would be slow on the current GPU, or None. On older ones, they spill registers."""
    if not torch.cuda.is_available() or (capability := torch.cuda.get_device_capability()) >= OLDEST:
        return None
    actual, oldest = ("{}.{}".format(*each) for each in (capability, OLDEST))
    return f"the GPU has compute capability {actual}, and kernels are made for {oldest} and later"


def check_fp8() -> None:
    """Raise ValueError if kernels on the current GPU cannot read a KV cache in fp8."""
    if torch.version.hip is None and (capability := torch.cuda.get_device_capability()) < OLDEST_WITH_FP8:
        actual, oldest = ("{}.{}".format(*each) for each in (capability, OLDEST_WITH_FP8))
        raise ValueError(f"kv_cache_dtype 'fp8' needs compute capability {oldest}, got {actual}: use 'int8'")


def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return DEFAULT_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def choose_prefill_rows(context: KernelContext, timer: Timer) -> int:
    """Return the fastest of PREFILL_ROWS for a long prompt, without those that don't fit into the GPU.

    The timed step reads only block 0, and writes no block.
    """
    angles, num_tokens, context = context.cos, TIMED_TOKENS, context._replace(ops=without_fallbacks(context.ops))
    if angles.element_size() == 4:
        return PREFILL_ROWS[0]  # more rows of float32 don't fit into a program's registers
    zeros = torch.zeros(num_tokens, dtype=torch.int64, device=angles.device)
    qkv = angles.new_zeros(num_tokens, context.num_heads + 2 * context.pool.num_kv_heads, angles.shape[1])
    step = AttentionMetadata([0, num_tokens], [num_tokens], zeros[None], zeros + NO_SLOT, zeros[:0])

    def seconds(rows: int) -> float:
        attend = KernelAttention(context._replace(prefill_rows=rows)).plan(step)

        def run() -> None:
            attend(0, qkv, zeros, None, None)

        try:
            run()  # compile the kernel first
        except Exception:  # too little shared memory, or too few registers
            return math.inf
        return min(timer(run) for _ in range(REPEATS))

    return min(PREFILL_ROWS, key=seconds)


def warm_up(model: LlamaForCausalLM, context: KernelContext, attention: KernelAttention) -> None:
    """Launch every kernel that a step may need, on padding rows, and wait for the results.

    Triton compiles each variant of a kernel (another dtype, another constant) on its first launch. After this call,
    requests don't wait for the compiler, and a kernel that can't be compiled has already failed.
    """
    blocks, device, head_dim = context.blocks, context.blocks.device, context.cos.shape[1]
    tables = torch.zeros(2, 2, dtype=torch.int64, device=device)  # the step reads block 0, and writes no block
    slots = torch.full((3,), NO_SLOT, dtype=torch.int64, device=device)
    no_blocks = torch.empty(0, dtype=torch.int64)
    step = AttentionMetadata([0, 2, 3], [2, 1], tables, slots, no_blocks)  # a prefill of two tokens, and a decode
    zeros = torch.zeros(3, dtype=torch.int64, device=device)  # token ids and positions
    logits = model.compute_logits(model(zeros, zeros, attention.plan(step)))  # [3, vocab_size]
    params = sampling_params(field_views(allocate_fields(SAMPLING_FIELDS, 3, device), SAMPLING_FIELDS), 3)
    sampled = torch.empty(3, 2, dtype=torch.float32, device=device)
    for scores in (logits, logits.float()):  # logits processors work in float32
        context.ops.sample_rows(scores, params, SamplingWorkspace(3, scores.shape[1], device), zeros, sampled)
    for num_splits in (1, 2):
        order = torch.zeros(3, 1, dtype=torch.int32, device=device)  # a context length, a row, and the index of a table
        q = context.cos.new_zeros(1, context.num_heads, head_dim)
        workspace = DecodeWorkspace(1, context.num_heads, head_dim, num_splits, device)
        decodes = DecodeMetadata(order[:1], order[0], workspace, *order[1:])
        context.ops.paged_decode(q, blocks, 0, decodes, torch.empty_like(q))
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            for rows in (*ROW_TILES, ROW_TILES[-1] + 1):
                x = context.cos.new_zeros(rows, layer.in_features)
                context.ops.gemm(x, layer, x.new_empty(rows, layer.out_features))
    sampled.tolist()  # waits for the device


class BuildBackend(Protocol):
    """The constructor of a backend, with all other arguments bound."""

    def __call__(self, ops: Ops, capture: Capture | None, timer: Timer) -> Backend: ...


class GpuChoice(Kernels):
    """The choice between Triton's kernels, with or without CUDA graphs, and plain operations.

    Kernels compile while the engine starts, so nothing has to wait for them later.
    """

    def __init__(
        self, backend: str, is_eager: bool, runner: ModelRunner, build: BuildBackend, ranks: RankGroup | None = None
    ) -> None:
        """Replace the runner's plain backend with one from `build`, if `backend`, one of BACKENDS, allows kernels.

        All `ranks` make the same choice. Raise ValueError if kernels are required and unavailable.
        """
        self._ranks = RankGroup() if ranks is None else ranks
        super().__init__({"torch": "as requested", "auto": too_old()}.get(backend))
        self._ops, self.has_graphs = PLAIN, False
        if backend == "numba":
            raise ValueError("attention_backend 'numba' is unavailable on a GPU: its kernels run on a CPU")
        if self.reason is None:
            self._try_kernels(is_eager, runner, build)
        if backend == "triton" and not self.uses_kernels:
            raise ValueError(f"attention_backend 'triton' is unavailable: {self.reason}")

    @property
    def description(self) -> str:
        """Describe the choice in a few words, for a command's summary or the server's log."""
        if not self.uses_kernels:
            return super().description
        graphs = "CUDA graphs" if self.has_graphs else f"no graphs: {self.reason}"
        plain = f", plain {' and '.join(names)}" if (names := plain_names(self._ops)) else ""
        return f"kernels: triton {version('triton')}, {graphs}{plain}"

    def _try_kernels(self, is_eager: bool, runner: ModelRunner, build: BuildBackend) -> None:
        try:
            self._ops = with_fallbacks(triton_ops())
        except ImportError as error:
            self.reason = f"triton cannot be imported: {error}"
            return
        self.reason = "enforce_eager" if is_eager else None
        for capture in [None] if is_eager else [CudaCapture(), None]:
            try:
                runner.backend = self._ranks.call_on_all(partial(build, self._ops, capture, seconds_on_gpu))
            except RankError:
                raise
            except Exception as error:  # too little memory for graphs, or a kernel that this GPU can't run
                traceback.print_exception(error)
                self.reason = f"{type(error).__name__}: {error}"
            else:
                self.uses_kernels, self.has_graphs = True, capture is not None
                return
