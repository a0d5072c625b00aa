"""GpuChoice: whether an engine on a GPU computes with Triton's kernels, with CUDA graphs of them, and why not."""

from importlib.metadata import version
from typing import Protocol

from ..torch.backend import Backend
from .graphs import Capture, CudaCapture
from .linear import Timer, seconds_on_gpu
from .ops import Ops, triton_ops


class Runner(Protocol):
    backend: Backend


class Build(Protocol):
    def __call__(self, ops: Ops, capture: Capture | None, timer: Timer) -> Backend:
        """Build the backend with kernels; `capture` None: without graphs."""


class GpuChoice:
    """The choice of an engine on a GPU. Triton compiles when a kernel is first used: nobody waits for it later."""

    is_compiling = awaits_idle = False

    def __init__(self, backend: str, is_eager: bool, runner: Runner, build: Build) -> None:
        """`backend` is one of BACKENDS; `runner` has the plain backend now, and gets that of build() in its place.

        Raise ValueError if kernels are forced and unavailable.
        """
        self.uses_kernels = self.has_graphs = False
        self.why: str | None = "they were asked for" if backend == "torch" else None  # plain operations
        if backend == "numba":
            raise ValueError("attention_backend 'numba' cannot be had: its kernels are for the CPU")
        if self.why is None:
            self._begin(is_eager, runner, build)
        if backend == "triton" and not self.uses_kernels:
            raise ValueError(f"attention_backend 'triton' cannot be had: {self.why}")

    @property
    def says(self) -> str:
        """Return the choice in words, for the last line of a command."""
        if not self.uses_kernels:
            return f"plain operations: {self.why}"
        graphs = "CUDA graphs" if self.has_graphs else f"no graphs: {self.why}"
        return f"kernels: triton {version('triton')}, {graphs}"

    def _begin(self, is_eager: bool, runner: Runner, build: Build) -> None:
        try:
            ops = triton_ops()
        except ImportError as error:
            self.why = f"triton cannot be imported: {error}"
            return
        self.why = "enforce_eager" if is_eager else None
        for capture in [None] if is_eager else [CudaCapture(), None]:
            try:
                runner.backend = build(ops, capture, seconds_on_gpu)
            except Exception as error:  # too little memory for graphs, a kernel that this GPU cannot run
                self.why = f"{type(error).__name__}: {error}"
            else:
                self.uses_kernels, self.has_graphs = True, capture is not None
                return

    def take_up(self) -> None:
        pass

    def wait(self, seconds: float) -> None:
        pass

    def close(self) -> None:
        pass
