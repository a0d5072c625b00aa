"""The gain in figures: steps and empty seats for a few long outputs among short ones, here and in stage 3."""

from pathlib import Path
from types import ModuleType

from .helpers import write_checkpoint

LENGTHS = [30, 3, 4, 2, 5, 28, 3, 6, 2, 4, 3, 5, 2, 25, 4, 3]
PROMPTS = [[1 + i] * (1 + i % 5) for i in range(16)]


def before(engine: ModuleType, folder: Path) -> dict[str, int]:
    return _count(engine, folder)


def now(engine: ModuleType, folder: Path) -> dict[str, int]:
    return _count(engine, folder)


def _count(engine: ModuleType, folder: Path) -> dict[str, int]:
    llm = engine.LLM(write_checkpoint(folder), block_size=4, max_num_seqs=4, kv_cache_tokens=1000)
    run, seats = llm.model_runner.run, []

    def watched(batch: list) -> list:
        seats.append(len(batch))
        return run(batch)

    llm.model_runner.run = watched
    llm.generate(PROMPTS, [engine.SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in LENGTHS])
    return {
        "steps for 16 requests on 4 seats": len(seats),
        "empty seats, summed over all steps": sum(4 - taken for taken in seats),
    }
