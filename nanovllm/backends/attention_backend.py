"""Which operations an engine computes with: the options attention_backend and enforce_eager, and the choice."""

import os

BACKENDS = ("auto", "numba", "triton", "torch")
VARIABLE = "NANOVLLM_ATTENTION_BACKEND"  # environment variable with the default of attention_backend


def backend_of(attention_backend: str | None, enforce_eager: bool, is_gpu: bool = False) -> str:
    """Return one of BACKENDS. Raise ValueError if the options contradict each other, or VARIABLE has an unknown value.

    On a GPU, eager means without CUDA graphs, as in vLLM. A CPU's kernels are compiled as a whole, so there eager means
    without kernels.
    """
    if enforce_eager and attention_backend == "numba":
        raise ValueError("enforce_eager excludes kernels, but attention_backend 'numba' requires them: use only one")
    if enforce_eager and not is_gpu and attention_backend != "triton":
        return "torch"
    if attention_backend not in (None, "auto"):
        return attention_backend
    backend = os.environ.get(VARIABLE) or "auto"
    if backend not in BACKENDS:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return backend


class KernelChoice:
    """The choice between kernels and plain operations. It belongs to the engine's thread.

    This class chooses plain operations for good. cpu/ and gpu/ extend it.
    """

    uses_kernels = False

    def __init__(self, reason: str | None) -> None:
        self.reason = reason  # for plain operations, or for kernels without CUDA graphs

    @property
    def description(self) -> str:
        """Describe the choice, for the last line of a command."""
        return f"plain operations: {self.reason}"

    @property
    def awaits_idle(self) -> bool:
        """Return whether kernels have been compiled, and will be used once no request is running."""
        return False

    def switch_when_ready(self) -> None:
        """Switch to the kernels if they have been compiled in the meantime. No request may be running."""

    def wait(self, seconds: float) -> None:
        """Wait for the compiler if it is still running, for at most `seconds`, and log why."""

    def close(self) -> None:
        """End the compiler if it is still running."""
