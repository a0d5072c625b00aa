"""A decode step of one engine in five ways, from plain operations to one call, and its floor.

Each way has one more kernel than the way before. Where Numba is not installed there is one way, plain operations.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.backends.cpu.backend import NumbaBackend, missing_requirement
from nanovllm.backends.torch.attention import PagedAttention
from nanovllm.backends.torch.backend import TorchBackend
from nanovllm.backends.torch.model_runner import ModelRunner
from nanovllm.bench import harness
from nanovllm.bench.floor import weight_bytes
from nanovllm.bench.peers import prompts_taken_as_computed
from stages.bench.models import num_parameters

PLAIN, PACKED, ATTENTION = "plain operations", "+ packed linear layers", "+ attention"
MANY, FEW = "+ norms, rotation, silu", "one call"
WAYS = PLAIN, PACKED, ATTENTION, MANY, FEW
PAUSE = 0.006  # seconds: a helper that has nothing to do looks for steps for less than that


class DecodeStep:
    """An engine in the middle of decoding `max_rows` sequences, each with `context` tokens computed or to compute."""

    def __init__(self, folder: Path, dtype: str, max_rows: int, context: int) -> None:
        room = {"kv_cache_tokens": max_rows * (context + 32), "max_num_seqs": max_rows, "watermark": 0.0}
        room |= {"max_num_batched_tokens": max(max_rows, 512), "enable_prefix_caching": False}
        backend = "torch" if missing_requirement() else "numba"
        self.llm = LLM(model=str(folder), device="cpu", dtype=dtype, attention_backend=backend, **room)
        self.engine, self.context = self.llm.llm_engine, context
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        with prompts_taken_as_computed(self.llm):
            self.engine.kv_cache.blocks.normal_(generator=torch.Generator().manual_seed(0))  # contexts that differ
            for number in range(max_rows):
                self.engine.add_request(str(number), {"prompt_token_ids": [300 + 37 * number] * context}, params)
            self.engine.step()
        self.seqs = list(self.engine.scheduler.running)
        assert len(self.seqs) == max_rows, f"{len(self.seqs)} sequences run, {max_rows} were asked for"
        self.runner = self.engine.executor
        plain = PagedAttention(self.engine.kv_cache, self.engine.config.slots_in_a_tile())
        self._ways = ways_of(self.runner, plain)

    def ways(self, rows: int) -> list[str]:
        """Return the ways in which this machine can compute a step of that many rows."""
        return [way for way in self._ways if way != FEW or rows <= self.runner.backend._decode_runner.max_rows]

    @torch.inference_mode()
    def tokens(self, way: str, rows: int) -> list[int]:
        """The tokens that a step gives. It can be run again: nobody advances."""
        with self._ways[way]() as run:
            return [token.token_id for token in run([(seq, 1) for seq in self.seqs[:rows]])]

    @torch.inference_mode()
    def seconds(self, way: str, rows: int, times: int = 3) -> float:
        """The median of some steps in a row. One comes before, and a pause: threads of another way go to sleep."""
        batch = [(seq, 1) for seq in self.seqs[:rows]]
        with self._ways[way]() as run:
            time.sleep(PAUSE)
            run(batch)
            return statistics.median(harness.seconds_of(lambda: run(batch)) for _ in range(times))

    def num_bytes(self, rows: int) -> int:
        """Return the bytes that a step has to read: all weights, and the keys and values of each context."""
        slots = rows * (self.context + 1)
        return weight_bytes(self.llm) + slots * self.engine.kv_cache.bytes_per_token

    def num_operations(self, rows: int) -> int:
        """Return the operations of the linear layers: a product and a sum for each weight and row."""
        return 2 * rows * num_parameters(self.llm.model_config)


def ways_of(runner: ModelRunner, plain: PagedAttention) -> dict[str, Callable[[], Any]]:
    """Each is a context: a function that runs a step so. With the engine's own swaps, some of them undone."""
    if not isinstance(runner.backend, NumbaBackend):
        return {PLAIN: partial(as_it_is, runner)}
    added = {PLAIN: (), PACKED: (PACKED,), ATTENTION: (PACKED, ATTENTION)}
    swapped = {way: partial(swapped_out, runner, plain, *kept) for way, kept in added.items()}
    return swapped | {MANY: partial(many_rows, runner), FEW: partial(as_it_is, runner)}


@contextmanager
def as_it_is(runner: ModelRunner) -> Iterator[Callable]:
    yield runner.run


@contextmanager
def computing_with(runner: ModelRunner, backend: Any) -> Iterator[Callable]:
    from nanovllm.backends.cpu.threads import numba_threads

    kernels, runner.backend = runner.backend, backend
    try:
        with numba_threads():
            yield runner.run
    finally:
        runner.backend = kernels


class ManyRows:
    """The backend with kernels, which takes a step of few rows like any other one."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def decode(self, batch: list) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


def many_rows(runner: ModelRunner) -> Any:
    """The swapped submodules, however few rows there are."""
    return computing_with(runner, ManyRows(runner.backend))


@contextmanager
def swapped_out(runner: ModelRunner, plain: PagedAttention, *kept: str) -> Iterator[Callable]:
    """Plain torch again, but for what is kept: PACKED linear layers, the kernel of ATTENTION."""
    model, kernels = runner.model, runner.backend
    layers = model.model
    model.model = layers.plain
    packed = {} if PACKED in kept else unpack(model)
    try:
        with computing_with(runner, TorchBackend(model, kernels._attention if ATTENTION in kept else plain)) as run:
            yield run
    finally:
        pack(model, packed)
        model.model = layers


def unpack(model: Any) -> dict[int, Any]:
    """Put the plain linear layers in. Returns the packed ones, by the number of the plain one."""
    from nanovllm.backends.cpu.matmul import PackedLinear
    from nanovllm.backends.cpu.model import swap_linears

    packed: dict[int, Any] = {}

    def plain_of(module: Any) -> Any:
        if not isinstance(module, PackedLinear):
            return module
        packed[id(module.plain)] = module
        return module.plain

    swap_linears(model, plain_of)
    return packed


def pack(model: Any, packed: Mapping[int, Any]) -> None:
    """Undo unpack()."""
    from nanovllm.backends.cpu.model import swap_linears

    swap_linears(model, lambda module: packed.get(id(module), module))


# ---- one core


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def seconds_on_one_core(step: DecodeStep) -> float:
    """A plain step's, without the profiler."""
    with one_thread():
        return step.seconds(PLAIN, 1)
