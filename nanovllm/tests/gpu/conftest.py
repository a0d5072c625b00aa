"""Kernels are tested in Triton's interpreter on the CPU (make test-triton), and on a GPU where there is one."""

import importlib.util
import os

import pytest
import torch


@pytest.fixture
def device() -> str:
    """Where Triton's kernels run in this process."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton: make test-triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, or Triton's interpreter: make test-triton")
    return "cuda"
