"""Which operations an engine computes with, as its caller says it."""

import os
from dataclasses import dataclass
from typing import Any

from ...engine.checks import Rule
from ...engine.flags import knob

BACKENDS = ("auto", "numba", "triton", "torch")
VARIABLE = "NANOVLLM_ATTENTION_BACKEND"  # of the environment: what auto stands for
RULE: Rule = (f"one of {', '.join(BACKENDS)} (vLLM's own are not here)", lambda value: value in BACKENDS)


@dataclass(frozen=True)
class KernelOptions:
    """The knobs of the command line. EngineArgs has them too."""

    attention_backend: str = knob(
        "auto", "numba: kernels on a CPU; triton: on a GPU; torch: plain operations; auto: the best", BACKENDS
    )
    enforce_eager: bool = knob(False, "on a GPU no CUDA graphs; on a CPU as --attention-backend torch")


def backend_of(attention_backend: str | None, enforce_eager: Any, is_gpu: bool = False) -> str:
    """One of BACKENDS. Raises ValueError if the two contradict each other, or for a wrong word in the environment.

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
