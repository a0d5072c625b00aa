"""choose_backend() picks the fastest backend that the engine's options and the machine allow."""

from functools import partial
from typing import NamedTuple

from ..distributed.rank_group import RankGroup
from ..engine.executor import Kernels
from ..engine.kv_cache import KVCache
from ..llama import LlamaForCausalLM
from ..options.attention_backend import backend_of
from .cpu.backend import CpuChoice, NumbaBackend
from .cpu.machine_code import Variant
from .gpu.backend import GpuChoice, TritonBackend, check_fp8
from .gpu.capture import Capture
from .gpu.model import Timer
from .gpu.ops import Ops
from .torch.attention import PagedAttention
from .torch.model_runner import ModelRunner


class ChosenBackend(NamedTuple):
    """An executor, and the Kernels object that switches its backend to compiled kernels when they are ready."""

    executor: ModelRunner
    kernels: Kernels


def choose_backend(
    model: LlamaForCausalLM,
    kv_cache: KVCache,
    tile_size: int,
    max_model_len: int,
    max_num_seqs: int,
    attention_backend: str | None = None,
    enforce_eager: bool = False,
    ranks: RankGroup | None = None,
) -> ChosenBackend:
    """Return an executor with the fastest backend that `attention_backend` and the machine allow.

    `tile_size` applies only to plain operations. Raise ValueError if kernels are required but unavailable.
    """
    device, variant = kv_cache.blocks.device, Variant(kv_cache.dtype, kv_cache.is_int8)
    backend = backend_of(attention_backend, enforce_eager, is_gpu=device.type == "cuda")
    runner = ModelRunner(model, PagedAttention(kv_cache, tile_size), kv_cache.block_size, device)
    if device.type == "cuda":

        def build_on_gpu(ops: Ops, capture: Capture | None, timer: Timer) -> TritonBackend:
            return TritonBackend(model, kv_cache, max_model_len, ops, capture, max_num_seqs, timer, ranks=ranks)

        if kv_cache.is_fp8 and backend != "torch":
            check_fp8()
        return ChosenBackend(runner, GpuChoice(backend, enforce_eager, runner, build_on_gpu, ranks))
    build_on_cpu = partial(NumbaBackend, model, kv_cache, max_model_len, ranks)
    unsupported = None
    if device.type != "cpu":
        unsupported = f"kernels need a CPU or a GPU, got device {device}"
    elif kv_cache.is_fp8:
        unsupported = "kv_cache_dtype 'fp8' has kernels on a GPU only, and 'int8' on a CPU, too"
    return ChosenBackend(runner, CpuChoice(backend, runner, build_on_cpu, variant, unsupported, ranks))
