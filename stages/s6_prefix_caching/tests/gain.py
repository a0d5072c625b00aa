"""The gain in figures: tokens that go through the model, with this stage's engine and with the previous one."""

from pathlib import Path
from types import ModuleType

from .helpers import write_checkpoint

PROMPT = [3 + 7 * i % 300 for i in range(40)]


def before(engine: ModuleType, folder: Path) -> dict[str, int]:
    return _count(engine, folder)


def now(engine: ModuleType, folder: Path) -> dict[str, int]:
    return _count(engine, folder)


def _count(engine: ModuleType, folder: Path) -> dict[str, int]:
    write_checkpoint(folder)
    one = engine.SamplingParams(temperature=0.0, max_tokens=1)

    def computed(*prompts: list[int]) -> int:
        """Return how many tokens a new engine computes for these prompts, one after the other."""
        llm = engine.LLM(folder, block_size=4)
        for prompt in prompts:
            llm.generate(prompt, one)
        return llm.model_runner.num_tokens

    return {
        "tokens computed, a prompt of 40 tokens twice": computed(PROMPT, PROMPT),
        "tokens computed, 8 questions of 6 tokens after the same 32": computed(
            *(PROMPT[:32] + [100 + i] * 6 for i in range(8))
        ),
    }
