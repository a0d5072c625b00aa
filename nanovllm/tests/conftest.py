import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ..__main__ import main
from ..options import config as engine_args
from ..options.attention_backend import BACKEND_VARIABLE
from .testing.checkpoints import write_checkpoint
from .testing.engines import UNMEASURED

os.environ[BACKEND_VARIABLE] = "torch"  # compile nothing unless a test asks for it


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # tiny models lose more time to thread synchronization than they gain


@pytest.fixture(scope="session", autouse=True)
def on_the_cpu() -> Iterator[None]:
    """Run on the CPU unless a test names a device. On a GPU, each engine would take nine tenths of the memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_args, "default_device", lambda: "cpu")
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command and returns (exit status, stdout, stderr).

    Engines don't measure speeds when they start.
    """

    def command(name: str, *arguments: str, model: Path | str = checkpoint) -> tuple[int, str, str]:
        status = main([*name.split(), "--model", str(model), *UNMEASURED, *arguments])
        return status, *capsys.readouterr()

    return command
