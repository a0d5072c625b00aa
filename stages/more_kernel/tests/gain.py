"""The gain in figures: what attention copies and reads in a decode step, with this branch's engine and stage 7's."""

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from .helpers import write_checkpoint
from .uncompiled import uncompiled

PROMPTS = [[7] * 47, *([5 + i] * 3 for i in range(7))]  # one long context beside seven short ones
NUM_LAYERS = 2


def before(engine: ModuleType, folder: Path) -> dict[str, int]:
    """Count with tiles: attention reads what was copied."""
    copied = _decode(engine, folder)["copied"]
    return {"slots copied": copied, "slots that attention reads": copied}


def now(engine: ModuleType, folder: Path) -> dict[str, int]:
    """Count with the kernel, which reads the slots that it has scores for. It isn't compiled."""
    kernel = import_module(".paged_kernel", engine.__name__)
    with uncompiled(kernel):
        counts = _decode(engine, folder, kernel)
    return {"slots copied": counts["copied"], "slots that attention reads": counts["copied"] + counts["read"]}


def _decode(engine: ModuleType, folder: Path, kernel: ModuleType | None = None) -> Counter[str]:
    """Return the slots of a layer that the second step copies, and that its kernel reads."""
    write_checkpoint(folder)
    llm = engine.LLM(folder, block_size=4, offload_policy="recompute")
    counts: Counter[str] = Counter()
    _watch(llm.model_runner, "compute_logits", lambda batch: counts.clear())  # so that the last step is left
    _watch(llm.kv_cache, "read", lambda layer, blocks: counts.update(copied=4 * blocks.numel()))
    if kernel:
        _watch(
            kernel, "score_block", lambda query, keys, head, scores: counts.update(read=(head == 0) * scores.shape[1])
        )
    llm.generate(PROMPTS, engine.SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    return Counter({name: count // NUM_LAYERS for name, count in counts.items()})


def _watch(owner: Any, name: str, note: Callable[..., object]) -> None:
    """Call `note` with the same arguments before each call of a function."""
    function = getattr(owner, name)

    def watched(*arguments: Any) -> Any:
        note(*arguments)
        return function(*arguments)

    setattr(owner, name, watched)
