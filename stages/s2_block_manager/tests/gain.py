"""The gain in figures: the slots that five requests hold, in this stage and in the previous one."""

from pathlib import Path
from types import ModuleType
from typing import Any

from .helpers import write_checkpoint

PROMPTS = [[1] * n for n in (1, 4, 7, 12, 3)]
LENGTHS = [30, 1, 13, 9, 20]


def before(engine: ModuleType, folder: Path) -> dict[str, int]:
    """Count in stage 1, where a sequence reserves prompt + max_tokens."""
    return _count(engine, engine.LLM(write_checkpoint(folder), kv_cache_tokens=128, reservation="request"))


def now(engine: ModuleType, folder: Path) -> dict[str, int]:
    return _count(engine, engine.LLM(write_checkpoint(folder), kv_cache_tokens=128, block_size=4))


def _count(engine: ModuleType, llm: Any) -> dict[str, int]:
    run, steps = llm.model_runner.run, []

    def watched(batch: list) -> list:
        steps.append((llm.kv_cache_manager.report().held, sum(seq.num_tokens for seq, _ in batch)))
        return run(batch)

    llm.model_runner.run = watched
    greedy = [engine.SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in LENGTHS]
    llm.generate(PROMPTS, greedy)
    return {
        "slots held, all steps added up": sum(held for held, _ in steps),
        "of these, slots without a token": sum(held - tokens for held, tokens in steps),
        "the most that are held at once": max(held for held, _ in steps),
    }
