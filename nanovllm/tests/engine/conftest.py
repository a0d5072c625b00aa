from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ...checkpoints.model_config import read_model_config
from ...checkpoints.tokenizer import HFTokenizer, load_tokenizer
from ...checkpoints.weights import load_model
from ...engine.sequence import Sequence
from ...llama import LlamaForCausalLM
from ...llm import LLM
from ...requests.tokens import StepOutput
from ..testing.checkpoints import train_tokenizer, write_checkpoint
from ..testing.simulated_cuda import Stream, current_stream, on_device, on_stream


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # tiny models lose more time to thread synchronization than they gain


@pytest.fixture(scope="session")
def tokenizer_model() -> bytes:
    return train_tokenizer()


@pytest.fixture(scope="session")
def checkpoint(tokenizer_model: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random Llama with 64 positions and 320 tokens, and a tokenizer."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), tokenizer_model=tokenizer_model)


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> LlamaForCausalLM:
    return load_model(checkpoint, read_model_config(checkpoint), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> HFTokenizer:
    return load_tokenizer(checkpoint)


@pytest.fixture
def scripted(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[int]], LLM]:
    """Return a function that builds an engine whose answer to every request is the given tokens."""

    def engine(token_ids: list[int]) -> LLM:
        llm = LLM(checkpoint, block_size=4, kv_cache_tokens=256)

        def run(batch: list[tuple[Sequence, int]]) -> StepOutput:
            return StepOutput(
                [token_ids[seq.num_tokens - seq.num_prompt_tokens] for seq, _ in batch], [-1.0] * len(batch)
            )

        monkeypatch.setattr(llm.llm_engine.executor, "run", run)
        return llm

    return engine


@pytest.fixture
def on_simulated_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], Tensor]:
    """Return a function that puts a tensor on a simulated CUDA device."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    for name, value in (("Stream", Stream), ("current_stream", current_stream), ("stream", on_stream)):
        monkeypatch.setattr(torch.cuda, name, value)
    return on_device
