"""NumbaBackend, which runs Numba's kernels, and CpuChoice, which decides whether to use it.

Neither needs Numba once the kernels are compiled.
"""

import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from ...distributed.rank_group import RankError, RankGroup
from ...engine.executor import Kernels, Scheduled
from ...engine.kv_cache import KVCache
from ...host_memory import host_memory
from ...llama import LlamaForCausalLM
from ...log import LINE_INTERVAL_SECONDS, logger
from ...quantization import keep_wide
from ...requests.tokens import SamplingRow, StepOutput
from ..torch.backend import Backend, Computed, SamplerAhead
from ..torch.model_runner import ModelRunner
from .compiler import DURATION, Compiler, compile_here, find_folder, is_complete, read_progress
from .machine_code import Variant
from .runner import StepRunner, sample_rows, why_unsupported

MIN_NUMBA_VERSION = (0, 68)
INSTALL_COMMAND = "pip install 'numba>=0.68'"
COMPILING_MESSAGE = "compiling kernels, once per machine: {} (Ctrl-C is safe, and leaves it to the next run)"


class NumbaBackend:
    """A Backend with Numba's kernels: each step is one compiled call."""

    ahead: SamplerAhead | None = None

    def __init__(
        self, model: LlamaForCausalLM, kv_cache: KVCache, max_model_len: int, ranks: RankGroup | None = None
    ) -> None:
        """Pack the weights of `model` in place. Raise ValueError if kernels cannot compute the model.

        All kernels must have been compiled. Any error, such as MemoryError, is raised on all `ranks`, and leaves the
        model unchanged.
        """
        if reason := why_unsupported(model):
            raise ValueError(reason)
        self.runner = StepRunner(model, kv_cache, max_model_len, ranks)

    def compute(self, batch: list[Scheduled]) -> Computed:
        hidden, logits = self.runner.run(batch)
        return Computed(hidden, [0, *accumulate(num_tokens for _, num_tokens in batch)], logits)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.runner.compute_logits(hidden)

    @contextmanager
    def sampling(self, computed: Computed) -> Iterator[None]:
        """Limit PyTorch to one thread if the step has only decodes.

        PyTorch's other threads would spin for a while on cores that the helpers of the next step need.
        """
        threads, has_only_decodes = torch.get_num_threads(), len(computed.hidden) == len(computed.query_start_loc) - 1
        torch.set_num_threads(1 if has_only_decodes else threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def sample(self, logits: Tensor, rows: list[SamplingRow]) -> StepOutput:
        return sample_rows(logits, rows, self.runner.find_likeliest)


class CpuChoice(Kernels):
    """The choice between Numba's kernels and plain operations.

    installed, suitable, in the cache   kernels from the first request on: they load in milliseconds
    installed, suitable, not compiled   a spawned process compiles them; plain operations are used until it ends and
                                        no request is running, so that no request is computed by both
    required by the caller              kernels, compiled before the engine is ready, or an error
    several ranks                       the same, but if one of them cannot use kernels, plain operations on all
    otherwise                           plain operations
    """

    def __init__(
        self,
        backend: str,
        runner: ModelRunner,
        build: Callable[[], Backend],
        variant: Variant,
        unsupported: str | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        """Replace the runner's backend with the one that `build` returns if `backend`, one of BACKENDS, allows it.

        `unsupported` is the reason why kernels cannot serve the engine's model, if there is one. All `ranks` make the
        same choice. Raise ValueError if kernels are required and unavailable.
        """
        if backend == "triton":
            raise ValueError("attention_backend 'triton' is unavailable on a CPU: its kernels run on a GPU")
        super().__init__("as requested" if backend == "torch" else unsupported or missing_requirement())
        self._runner, self._build, self._ranks = runner, build, RankGroup() if ranks is None else ranks
        self._compiler: Compiler | None = None
        if self.reason is None:
            self._variant, self._folder = variant, find_folder(variant.name)
            if backend == "numba" or self._ranks.world_size > 1:
                self._compile_first(is_required=backend == "numba")
            else:
                self._load_or_compile()
        elif backend == "numba":
            raise ValueError(f"attention_backend 'numba' is unavailable: {self.reason}")
        CHOICES.add(self)

    @property
    def description(self) -> str:
        """Describe the choice in a few words, for a command's summary or the server's log."""
        if not self.uses_kernels:
            return super().description
        return f"kernels: numba {version('numba')}, {torch.get_num_threads()} threads"

    @property
    def awaits_idle(self) -> bool:
        """Return whether the compiler has ended, so switch_when_ready() has work to do once no request is running."""
        return self._compiler is not None and self._compiler.has_ended

    def wait(self, seconds: float) -> None:
        """Wait for at most `seconds` while the compiler runs, and log how far it is."""
        while self._compiler is not None and not self._compiler.has_ended and seconds > 0:
            logger.info(COMPILING_MESSAGE.format(read_progress(self._folder)))
            self._compiler.wait(min(seconds, LINE_INTERVAL_SECONDS))
            seconds -= LINE_INTERVAL_SECONDS

    def switch_when_ready(self) -> None:
        """Switch to the kernels if they have been compiled in the meantime. No request may be running."""
        if self._compiler is None or not self._compiler.has_ended:
            return
        error, self._compiler = self._compiler.error, None
        if error is None and self._folder is not None and load_if_complete(self._variant, self._folder):
            self._use_kernels()
        else:
            self.reason = f"kernels could not be compiled: {error or 'their files are damaged'}"

    def close(self) -> None:
        """Stop the compiler if it is still running."""
        if self._compiler is not None:
            self._compiler.close()
            self._compiler, self.reason = None, "the engine was closed"

    def _compile_first(self, is_required: bool) -> None:
        if self._folder is None or not is_complete(self._folder):
            logger.info(COMPILING_MESSAGE.format(DURATION))
        try:
            self._ranks.call_on_all(partial(compile_here, self._variant, self._folder))
            self._runner.backend = self._build()
        except RankError:
            raise
        except Exception as error:
            self.reason = f"{type(error).__name__}: {error}"
            if is_required:
                raise ValueError(f"attention_backend 'numba' is unavailable: {self.reason}") from error
        else:
            self.uses_kernels, self.reason = True, None

    def _load_or_compile(self) -> None:
        if self._folder is None:
            self.reason = "no folder for compiled kernels is writable: set NUMBA_CACHE_DIR to a writable one"
            return
        if load_if_complete(self._variant, self._folder):
            self._use_kernels()
            return
        try:
            self._compiler = Compiler(self._variant, self._folder)
            self.reason = "kernels are being compiled (once per machine)"
            keep_wide(self._runner.model, host_memory().available // 2, self._variant.dtype)
        except OSError as error:
            self.reason = f"kernels could not be compiled: {error}"

    def _use_kernels(self) -> None:
        keep_wide(self._runner.model, 0, self._variant.dtype)
        try:
            self._runner.backend = self._build()
        except Exception as error:  # too little memory or no thread: plain operations need less
            self.reason = f"kernels could not be loaded: {type(error).__name__}: {error}"
        else:
            self.uses_kernels, self.reason = True, None

    def forget_compiler(self) -> None:
        """Leave the compiler to the parent, because this process is a forked child."""
        if self._compiler is not None:
            self._compiler.forget()
            self._compiler, self.reason = None, "this process was forked"


def load_if_complete(variant: Variant, folder: Path) -> bool:
    """Load the kernels from the folder if it is complete, and return whether that worked. Remove a damaged folder."""
    if not is_complete(folder):
        return False
    try:
        compile_here(variant, folder)
    except Exception:  # a damaged file may raise anything
        shutil.rmtree(folder, ignore_errors=True)
        return False
    with suppress(OSError):
        os.utime(folder)  # marks the folder as used, so that remove_old() keeps it
    return True


def missing_requirement() -> str | None:
    """Return why kernels are unavailable in this process, or None."""
    try:
        installed = version("numba")
    except PackageNotFoundError:
        return f"numba is not installed ({INSTALL_COMMAND})"
    if tuple(int(part) for part in installed.split(".")[:2]) < MIN_NUMBA_VERSION:
        return f"numba 0.68 or newer is needed, but {installed} is installed ({INSTALL_COMMAND})"
    return None


CHOICES: weakref.WeakSet[CpuChoice] = weakref.WeakSet()  # all choices of this process


def after_fork() -> None:
    """Use one thread in a forked child, which has neither the OpenMP threads nor the helpers of its parent."""
    if choices := list(CHOICES):
        torch.set_num_threads(1)
    for choice in choices:
        choice.forget_compiler()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=after_fork)
