from collections.abc import Iterator

import pytest

from .served import Served, serving


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """The shipped checkpoint, which has no chat template of its own."""
    with serving("--chat-template", "plain", "--max-num-seqs", "8") as server:
        yield server
        assert server.process.poll() is None, "it has survived all tests"
        assert server.stop() == 0
