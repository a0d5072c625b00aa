"""The gain in figures: 8 samples of 5 tokens, of a prompt of 200. Stage 4 gets the prompt 8 times."""

from pathlib import Path
from types import ModuleType
from typing import Any

from .helpers import CONFIG, write_checkpoint

N, BLOCK_SIZE = 8, 16
PROMPT = [i % 319 + 1 for i in range(200)]


def before(engine: ModuleType, folder: Path) -> dict[str, int]:
    return _count(engine, folder, [PROMPT] * N)


def now(engine: ModuleType, folder: Path) -> dict[str, int]:
    return _count(engine, folder, [PROMPT], n=N)


def _count(engine: ModuleType, folder: Path, prompts: list[list[int]], **sampling: Any) -> dict[str, int]:
    write_checkpoint(folder, CONFIG | {"max_position_embeddings": 256})
    llm = engine.LLM(folder, block_size=BLOCK_SIZE, kv_cache_tokens=200 * BLOCK_SIZE)
    llm.generate(prompts, engine.SamplingParams(seed=0, max_tokens=5, ignore_eos=True, **sampling))
    return {
        "blocks held at once": llm.peak.held // BLOCK_SIZE,
        "tokens through the model": llm.model_runner.num_tokens,
    }
