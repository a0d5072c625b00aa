"""The gain in figures: steps for tokens that repeat themselves, with this branch's engine and with stage 7's."""

from pathlib import Path
from types import ModuleType
from typing import Any

from .helpers import CONFIG, random_tensors, write_checkpoint

PROMPT = [3 + 7 * i for i in range(8)]
MAX_TOKENS = 48


def before(engine: ModuleType, folder: Path) -> dict[str, int]:
    return _count(engine, folder)


def now(engine: ModuleType, folder: Path) -> dict[str, int]:
    return _count(engine, folder, prompt_lookup_max=1)


def write_repetitive_checkpoint(folder: Path) -> Path:
    """Write a model in which each token depends on the one before it only: soon, the text repeats itself."""
    tensors = random_tensors(CONFIG, seed=1)
    for name in tensors:
        if "o_proj" in name or "down_proj" in name:
            tensors[name] *= 0
    return write_checkpoint(folder, tensors=tensors)


def _count(engine: ModuleType, folder: Path, **options: Any) -> dict[str, int]:
    llm = engine.LLM(write_repetitive_checkpoint(folder), offload_policy="recompute", **options)
    llm.generate([PROMPT], engine.SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True))
    return {f"steps for {MAX_TOKENS} tokens of a text that repeats itself": llm.model_runner.num_steps}
