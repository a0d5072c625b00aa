from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ..llama import LlamaForCausalLM, ModelConfig, Tokenizer, load_model
from ..llm import LLM
from ..sampling import SampledToken
from ..sequence import Sequence
from .helpers import train_tokenizer, write_checkpoint


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # tiny models lose time with more


@pytest.fixture(scope="session")
def tokenizer_model() -> bytes:
    return train_tokenizer()


@pytest.fixture(scope="session")
def checkpoint(tokenizer_model: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random Llama with 64 positions, 320 tokens and a tokenizer."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), tokenizer_model=tokenizer_model)


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> LlamaForCausalLM:
    return load_model(checkpoint, ModelConfig.from_folder(checkpoint), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint)


@pytest.fixture
def scripted(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[int]], LLM]:
    """Return a function that builds an engine which answers each request with the given tokens."""

    def engine(token_ids: list[int]) -> LLM:
        llm = LLM(checkpoint)

        def run(batch: list[tuple[Sequence, int]]) -> list[SampledToken]:
            return [SampledToken(token_ids[seq.num_tokens - seq.num_prompt_tokens], -1.0) for seq, _ in batch]

        monkeypatch.setattr(llm.model_runner, "run", run)
        return llm

    return engine
