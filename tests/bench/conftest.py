from collections.abc import Callable
from pathlib import Path

import pytest

from nanovllm.tests.conftest import checkpoint, on_the_cpu, one_thread  # noqa: F401 - fixtures of the package's tests
from nanovllm.tests.gpu.conftest import device  # noqa: F401
from nanovllm.tests.testing.engines import UNMEASURED
from stages.bench.__main__ import main


@pytest.fixture
def run(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:  # noqa: F811
    """Return a function that runs a benchmark and returns (exit status, stdout, stderr).

    Engines don't measure speeds when they start.
    """

    def command(name: str, *arguments: str, model: Path | str = checkpoint) -> tuple[int, str, str]:
        status = main([name, "--model", str(model), *UNMEASURED, *arguments])
        return status, *capsys.readouterr()

    return command
