"""The choice of a backend from the options attention_backend and enforce_eager."""

import os

BACKENDS = ("auto", "numba", "triton", "torch")
BACKEND_VARIABLE = "NANOVLLM_ATTENTION_BACKEND"  # an environment variable: the default of attention_backend


def backend_of(attention_backend: str | None, enforce_eager: bool, is_gpu: bool = False) -> str:
    """Return one of BACKENDS. Raise ValueError if the options contradict each other or BACKEND_VARIABLE is invalid.

    On a GPU, enforce_eager turns off only CUDA graphs, as in vLLM, and has no effect on the backend. On a CPU, it turns
    off the kernels, because they are compiled as a whole.
    """
    if enforce_eager and attention_backend == "numba":
        raise ValueError("enforce_eager excludes kernels, but attention_backend 'numba' requires them: use only one")
    if enforce_eager and not is_gpu and attention_backend != "triton":
        return "torch"
    if attention_backend not in (None, "auto"):
        return attention_backend
    backend = os.environ.get(BACKEND_VARIABLE) or "auto"
    if backend not in BACKENDS:
        raise ValueError(f"{BACKEND_VARIABLE} must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return backend
