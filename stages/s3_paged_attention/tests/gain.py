"""The gain in figures: memory and operations of a decode step, in this stage and in the previous one."""

from pathlib import Path
from types import ModuleType
from typing import Any

from .helpers import CONFIG, write_checkpoint
from .watch import Watch


def before(engine: ModuleType, folder: Path) -> dict[str, int]:
    return _count(engine, folder)


def now(engine: ModuleType, folder: Path) -> dict[str, int]:
    return _count(engine, folder, tile_size=512)


def _count(engine: ModuleType, folder: Path, **options: Any) -> dict[str, int]:
    write_checkpoint(folder, CONFIG | {"max_position_embeddings": 2048})
    llm = engine.LLM(folder, block_size=4, kv_cache_tokens=8192)
    small = engine.LLM(folder, block_size=4, kv_cache_tokens=8192, **options)
    num_operations = [_decode(engine, llm, [4] * num_seqs).num_operations for num_seqs in (2, 20)]
    return {
        "the largest tensor, context 512 (bytes)": _decode(engine, small, [511]).largest,
        "the largest tensor, context 2,000 (bytes)": _decode(engine, small, [1999]).largest,
        "operations that 18 more sequences add": num_operations[1] - num_operations[0],
    }


def _decode(engine: ModuleType, llm: Any, lengths: list[int]) -> Watch:
    """Watch the model in the second step of prompts of these lengths: each decodes one token."""
    compute_logits, steps = llm.model_runner.compute_logits, []

    def watched(batch: list) -> Any:
        with Watch() as watch:
            logits = compute_logits(batch)
        steps.append(watch)
        return logits

    llm.model_runner.compute_logits = watched
    llm.generate([[7] * n for n in lengths], engine.SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    del llm.model_runner.compute_logits
    return steps[1]
