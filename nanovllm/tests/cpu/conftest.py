from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from ...backends.cpu.cache import find_folder
from ...backends.cpu.compiling import compile_here, fill


@pytest.fixture(scope="session")
def kernels_folder(request: pytest.FixtureRequest) -> Path:
    """For machine code. It stays until `make clean`: whoever tests again compiles what has changed."""
    return Path(request.config.cache.mkdir("kernels"))


@pytest.fixture(scope="session")
def compiled(kernels_folder: Path) -> Callable[[torch.dtype], None]:
    """compiled(dtype): all kernels are there. Of several processes the first compiles them, the others load."""

    @cache
    def load(dtype: torch.dtype) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NUMBA_CACHE_DIR", str(kernels_folder))
            folder = find_folder(str(dtype).removeprefix("torch."))
        assert folder is not None
        fill(dtype, folder)
        compile_here(dtype, folder)

    return load


@pytest.fixture
def with_kernels(
    compiled: Callable[[torch.dtype], None], kernels_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """An engine may ask for float32 kernels: they are there."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(kernels_folder))
    compiled(torch.float32)
    yield
