from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from ...backends.cpu.compiler import compile_here, find_folder
from ...backends.cpu.machine_code import Variant


@pytest.fixture(scope="session")
def kernels_folder(request: pytest.FixtureRequest) -> Path:
    """Return a folder for machine code that stays until `make clean`, so that later test runs compile only changes."""
    return Path(request.config.cache.mkdir("kernels"))


@pytest.fixture(scope="session")
def compiled(kernels_folder: Path) -> Callable[[torch.dtype], None]:
    """Return a function that compiles all kernels for a dtype, in one process while any others wait and load."""

    @cache
    def load(dtype: torch.dtype, is_kv_int8: bool = False) -> None:
        variant = Variant(dtype, is_kv_int8)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NUMBA_CACHE_DIR", str(kernels_folder))
            folder = find_folder(variant.name)
        assert folder is not None
        compile_here(variant, folder)

    return load


@pytest.fixture
def with_kernels(
    compiled: Callable[[torch.dtype], None], kernels_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Compile float32 kernels where an engine will look for them."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(kernels_folder))
    compiled(torch.float32)
    yield
