"""attention_backend and enforce_eager: which operations an engine computes with, as its user asks for them."""

import os
from typing import Any

BACKENDS = ("auto", "numba", "triton", "torch")
VARIABLE = "NANOVLLM_ATTENTION_BACKEND"  # of the environment: what auto stands for
RULE = (f"one of {', '.join(BACKENDS)} (vLLM's own are not here)", lambda value: value in BACKENDS)


def backend_of(attention_backend: str | None, enforce_eager: Any, is_gpu: bool = False) -> str:
    """Return one of BACKENDS. Raise ValueError if the two contradict each other, or for a wrong word in VARIABLE.

    Eager on a GPU is without graphs, as in vLLM. A CPU's kernels are compiled as a whole: eager is without them.
    """
    if enforce_eager and attention_backend == "numba":
        raise ValueError("enforce_eager is for plain operations, attention_backend 'numba' for kernels: give one")
    if enforce_eager and not is_gpu and attention_backend != "triton":
        return "torch"
    if attention_backend not in (None, "auto"):
        return attention_backend
    backend = os.environ.get(VARIABLE) or "auto"
    if backend not in BACKENDS:
        raise ValueError(f"{VARIABLE} must be {RULE[0]}, not {backend!r}")
    return backend
