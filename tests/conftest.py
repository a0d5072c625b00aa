"""Fixtures for the tests that span stages: every stage, and every device of this machine."""

import importlib
import os
from types import ModuleType

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: threads compete on a busy machine
os.environ.setdefault("NANOVLLM_ATTENTION_BACKEND", "torch")  # compile no kernels unless a test needs them
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest

from tests.helpers import ROOT, find_branches, find_stages, has_cuda, nightly

collect_ignore = ["museum"]  # the museum copies these tests into stages


@pytest.fixture(scope="session", params=[*find_stages(ROOT), *map(nightly, find_branches(ROOT))])
def stage(request: pytest.FixtureRequest) -> ModuleType:
    """Each stage and branch as a module: stages.s1_contiguous_cache, ..."""
    try:
        return importlib.import_module(request.param)
    except ModuleNotFoundError as error:
        if error.name != "numba":  # more_kernel needs it, and not every Python has it
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not has_cuda():
        pytest.skip("this machine has no CUDA device")
    return request.param
