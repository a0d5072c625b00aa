"""The gain in figures: four outputs of a prompt of 40 tokens, as beams of this branch and as requests of stage 5."""

from pathlib import Path
from types import ModuleType
from typing import Any

from .helpers import write_checkpoint

WIDTH, MAX_TOKENS, BLOCK_SIZE = 4, 13, 4
PROMPT = list(range(1, 41))
COSTS = ("blocks copied",)  # what grows: the price of the gain
LOOK = """The story above is greedy. To search for one:

    python -m {your_code} --beam-width 4 "Once upon a time there was a princess"
"""


def before(engine: ModuleType, folder: Path) -> dict[str, int]:
    llm = engine.LLM(write_checkpoint(folder), block_size=BLOCK_SIZE)
    llm.generate([PROMPT] * WIDTH, engine.SamplingParams(seed=0, max_tokens=MAX_TOKENS, ignore_eos=True))
    return _counts(llm)


def now(engine: ModuleType, folder: Path) -> dict[str, int]:
    llm = engine.LLM(write_checkpoint(folder), block_size=BLOCK_SIZE)
    llm.beam_search([PROMPT], engine.BeamSearchParams(WIDTH, MAX_TOKENS, ignore_eos=True))
    return _counts(llm)


def _counts(llm: Any) -> dict[str, int]:
    return {
        "blocks held at once": llm.peak.held // BLOCK_SIZE,
        "blocks copied": llm.kv_cache.num_blocks_copied,
        "tokens through the model": llm.model_runner.num_tokens,
    }
