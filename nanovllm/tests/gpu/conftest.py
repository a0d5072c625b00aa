"""Kernels are tested on a GPU if there is one, and otherwise on the CPU in Triton's interpreter (make test-triton)."""

import os
from importlib.util import find_spec

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [] if find_spec("triton") else ["interpreter.py", "compiler.py"]

if IS_INTERPRETED and find_spec("triton"):
    from .interpreter import fix_interpreter

    fix_interpreter()


@pytest.fixture
def device() -> str:
    """Return the device that Triton's kernels run on in this process, or skip the test."""
    if find_spec("triton") is None:
        pytest.skip("needs triton: make test-triton")
    if not IS_INTERPRETED and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, or Triton's interpreter: make test-triton")
    return "cpu" if IS_INTERPRETED else "cuda"
