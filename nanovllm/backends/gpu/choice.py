"""GpuChoice: whether an engine on a GPU computes with Triton's kernels, with CUDA graphs of them, and why not."""

from importlib.metadata import version
from typing import Protocol

from .graphs import Capture, CudaCapture
from .linear import Timer, seconds_on_gpu
from .ops import Ops, triton_ops


class Runner(Protocol):
    def use_kernels(self, ops: Ops, capture: Capture | None, max_rows: int, timer: Timer | None) -> None: ...


class GpuChoice:
    """An engine's, with the face of Choice. Triton compiles when a kernel is first used: nothing is waited for."""

    is_compiling = awaits_idle = False

    def __init__(self, backend: str, is_eager: bool, runner: Runner, max_rows: int) -> None:
        """backend: one of BACKENDS. Raises ValueError if kernels are forced and cannot be had."""
        self.uses_kernels = self.has_graphs = False
        self.why: str | None = "they were asked for" if backend == "torch" else None  # plain operations
        if backend == "numba":
            raise ValueError("attention_backend 'numba' cannot be had: its kernels are for the CPU")
        if self.why is None:
            self._begin(is_eager, runner, max_rows)
        if backend == "triton" and not self.uses_kernels:
            raise ValueError(f"attention_backend 'triton' cannot be had: {self.why}")

    @property
    def says(self) -> str:
        """For the last line of a command."""
        if not self.uses_kernels:
            return f"plain operations: {self.why}"
        graphs = "CUDA graphs" if self.has_graphs else f"no graphs: {self.why}"
        return f"kernels: triton {version('triton')}, {graphs}"

    def _begin(self, is_eager: bool, runner: Runner, max_rows: int) -> None:
        try:
            ops = triton_ops()
        except ImportError as error:
            self.why = f"triton cannot be imported: {error}"
            return
        self.why = "enforce_eager" if is_eager else None
        for capture in [None] if is_eager else [CudaCapture(), None]:
            try:
                runner.use_kernels(ops, capture, max_rows, seconds_on_gpu)
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
