"""The gain in figures: the tokens that go through the model for twelve new ones, without a cache and with it."""

from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..llama import ModelConfig, load_model
from .helpers import greedy_without_cache, write_checkpoint

BEFORE = "no cache"  # no stage is before this one
PROMPT, NUM_NEW = [1, 300, 301, 302, 303], 12


def before(engine: ModuleType, folder: Path) -> dict[str, int]:
    """Count without an engine: the whole text goes through the model for each new token."""
    config = ModelConfig.from_folder(write_checkpoint(folder))
    model = load_model(folder, config, torch.float32, torch.device("cpu"))
    steps: list[int] = []

    def watch(module: object, inputs: tuple[Any, ...]) -> None:
        steps.append(len(inputs[0]))

    model.register_forward_pre_hook(watch)
    greedy_without_cache(model, PROMPT, NUM_NEW)
    return _figures(steps)


def now(engine: ModuleType, folder: Path) -> dict[str, int]:
    llm, steps = engine.LLM(write_checkpoint(folder)), list[int]()
    run = llm.model_runner.run

    def watched(batch: list) -> Any:
        steps.append(sum(num_tokens for _, num_tokens in batch))
        return run(batch)

    llm.model_runner.run = watched
    llm.generate([PROMPT], engine.SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True))
    return _figures(steps)


def _figures(steps: list[int]) -> dict[str, int]:
    return {
        "tokens through the model, for 12 new ones": sum(steps),
        "of these, in the last step": steps[-1],
    }
