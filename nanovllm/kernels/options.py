"""Which operations an engine computes with, as its caller says it."""

import os
from dataclasses import dataclass
from typing import Any

from ..core.checks import Rule
from ..core.flags import knob

BACKENDS = ("auto", "numba", "torch")
VARIABLE = "NANOVLLM_ATTENTION_BACKEND"  # of the environment: what auto stands for
RULE: Rule = (f"one of {', '.join(BACKENDS)} (vLLM's own are not here)", lambda value: value in BACKENDS)


@dataclass(frozen=True)
class KernelOptions:
    """The knobs of the command line. EngineArgs has them too."""

    attention_backend: str = knob(
        "auto", "numba: compiled kernels; torch: plain operations; auto: kernels if there are", BACKENDS
    )
    enforce_eager: bool = knob(False, "compute with plain operations, as --attention-backend torch does")


def backend_of(attention_backend: str | None, enforce_eager: Any) -> str:
    """One of BACKENDS. Raises ValueError if the two contradict each other, or for a wrong word in the environment."""
    if enforce_eager:
        if attention_backend == "numba":
            raise ValueError("enforce_eager is for plain operations, attention_backend 'numba' for kernels: give one")
        return "torch"
    if attention_backend not in (None, "auto"):
        return attention_backend
    backend = os.environ.get(VARIABLE) or "auto"
    if backend not in BACKENDS:
        raise ValueError(f"{VARIABLE} must be {RULE[0]}, not {backend!r}")
    return backend
