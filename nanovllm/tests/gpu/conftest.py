"""Kernels are tested in Triton's interpreter on the CPU (make test-triton), and on a GPU where there is one."""

import os
from importlib.util import find_spec

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [] if find_spec("triton") else ["interpreter.py", "compile_kernels.py", "launch_forms.py"]

if IS_INTERPRETED and find_spec("triton"):
    from .interpreter import mend

    mend()


@pytest.fixture
def device() -> str:
    """Where Triton's kernels run in this process."""
    if find_spec("triton") is None:
        pytest.skip("needs triton: make test-triton")
    if not IS_INTERPRETED and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, or Triton's interpreter: make test-triton")
    return "cpu" if IS_INTERPRETED else "cuda"
