"""choose_backend(): the executor of an engine, and what it computes with."""

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..llama import LlamaForCausalLM
from .cpu.backend import NumbaBackend, refusal
from .cpu.choice import Choice
from .gpu.backend import GpuChoice, TritonBackend
from .options import backend_of
from .torch.attention import PagedAttention
from .torch.model_runner import ModelRunner

if TYPE_CHECKING:
    from ..engine.kv_cache import KVCache


class Kernels(Protocol):
    """The choice between kernels and plain operations, and its reason. It belongs to the engine's thread."""

    uses_kernels: bool
    why: str | None  # plain operations compute, or no CUDA graphs

    @property
    def says(self) -> str: ...  # all of it in words

    @property
    def is_compiling(self) -> bool: ...  # another process compiles them, plain operations compute until it has ended

    @property
    def awaits_idle(self) -> bool: ...  # compiled, and to be taken up while there is no request

    def take_up(self) -> None: ...
    def wait(self, seconds: float) -> None: ...  # for the compiler
    def close(self) -> None: ...  # end it


class Chosen(NamedTuple):
    executor: ModelRunner
    kernels: Kernels  # it changes the executor's backend when they have been compiled


def choose_backend(
    model: LlamaForCausalLM,
    kv_cache: "KVCache",
    tile_size: int,
    max_model_len: int,
    max_num_seqs: int,
    attention_backend: str | None = None,
    enforce_eager: bool = False,
) -> Chosen:
    """Return an executor that computes with the fastest operations that `attention_backend` and the machine allow.

    `tile_size` is for plain operations. Raise ValueError if kernels are forced and unavailable.
    """
    device, dtype = kv_cache.blocks.device, kv_cache.blocks.dtype
    backend = backend_of(attention_backend, enforce_eager, is_gpu=device.type == "cuda")
    runner = ModelRunner(model, PagedAttention(kv_cache, tile_size), kv_cache.block_size, device)
    if device.type == "cuda":
        build = partial(TritonBackend, model, kv_cache, max_model_len, max_rows=max_num_seqs)
        return Chosen(runner, GpuChoice(backend, enforce_eager, runner, build))
    build_on_cpu = partial(NumbaBackend, model, kv_cache, max_model_len)
    return Chosen(runner, Choice(backend, runner, build_on_cpu, dtype, refusal(device)))
