from collections.abc import Iterator

import pytest

from ... import LLM
from ...checkpoints.chat_template import read_template
from ..testing.engines import OPTIONS
from ..testing.served import STORYTELLER, Served, serving

NAMES = ("--served-model-name", "storyteller", "--served-model-name", "fox")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run asynchronous tests with asyncio alone."""
    return "asyncio"


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """Serve the shipped checkpoint, which has no chat template of its own."""
    with serving("--chat-template", "plain", "--max-num-seqs", "8", *NAMES) as server:
        yield server
        assert server.process.poll() is None, "the server must survive all tests"
        assert server.stop() == 0


@pytest.fixture(scope="session")
def llm() -> LLM:
    """Load the same model without a server."""
    return LLM(str(STORYTELLER), chat_template=read_template("plain"), **OPTIONS)
