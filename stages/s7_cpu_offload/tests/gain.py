"""The gain in figures: tokens computed twice in a small pool, with this stage's engine and with the previous one."""

from pathlib import Path
from types import ModuleType
from typing import Any

from .helpers import write_checkpoint

BLOCK_SIZE = 4
PROMPTS = [[3 + (7 * i + 11 * j) % 300 for i in range(12)] for j in range(6)]
LONG = [[3 + (7 * i + j) % 300 for i in range(40)] for j in range(3)]
MAX_TOKENS = 24


def before(engine: ModuleType, folder: Path) -> dict[str, int]:
    return _count(engine, folder)


def now(engine: ModuleType, folder: Path) -> dict[str, int]:
    return _count(engine, folder, offload_policy="load", kv_offloading_tokens=288)


def _count(engine: ModuleType, folder: Path, **options: Any) -> dict[str, int]:
    write_checkpoint(folder)

    def computed(num_blocks: int, prompts: list, max_tokens: int) -> int:
        """Return how many tokens an engine with that pool computes beyond those that these requests need."""
        size = {"block_size": BLOCK_SIZE, "kv_cache_tokens": num_blocks * BLOCK_SIZE}
        llm = engine.LLM(folder, watermark=0.0, **size, **options)
        greedy = engine.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for batch in prompts:
            llm.generate(batch, greedy)
        needed = {tuple(prompt): len(prompt) + max_tokens - 1 for batch in prompts for prompt in batch}
        return llm.model_runner.num_tokens - sum(needed.values())

    return {
        "tokens computed twice, 6 requests in a third of the memory": computed(18, [PROMPTS], MAX_TOKENS),
        "tokens computed twice, 3 prompts that come again": computed(12, [[prompt] for prompt in LONG * 2], 1),
    }
