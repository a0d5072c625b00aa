"""The gain in figures: prompt tokens in steps in which others decode, with this branch's engine and with stage 7's."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from .helpers import write_checkpoint
from .other_engines import EngineAtOnce

SHORT = [[3 + 50 * j + i for i in range(3)] for j in range(4)]
LONG = [[3 + (7 * i + 11 * j) % 300 for i in range(43)] for j in range(2)]


def before(engine: ModuleType, folder: Path) -> dict[str, int]:
    return _count(engine, folder)


def now(engine: ModuleType, folder: Path) -> dict[str, int]:
    return _count(engine, folder, import_module(f"{engine.__name__}.prefill").serve)


def _count(engine: ModuleType, folder: Path, serve: Callable[..., None] | None = None) -> dict[str, int]:
    """Let two long prompts arrive while four sequences decode."""
    write_checkpoint(folder)
    decoding, other = (engine.LLM(folder, block_size=4, offload_policy="load").llm_engine for _ in range(2))
    if serve:
        decoding.prefill = EngineAtOnce(serve, other)
    sizes = _watch(decoding.model_runner)
    for number, prompt in enumerate(SHORT):
        decoding.add_request(f"short {number}", prompt, _greedy(engine, 24))
    decoding.step()
    for number, prompt in enumerate(LONG):
        decoding.add_request(f"long {number}", prompt, _greedy(engine, 8))
    while decoding.has_unfinished_requests():
        decoding.step()
    return {
        "prompt tokens computed in steps in which others decode": sum(of_prompts for _, of_prompts in sizes),
        "tokens in the largest of these steps": max(map(sum, sizes)),
    }


def _greedy(engine: ModuleType, max_tokens: int) -> Any:
    return engine.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def _watch(runner: Any) -> list[tuple[int, int]]:
    """Return a list that will have the tokens of each step in which a sequence decodes: decoded, and of prompts."""
    sizes, run = list[tuple[int, int]](), runner.run

    def run_and_count(batch: list[tuple[Any, int]]) -> Any:
        of_prompts = [num_tokens for seq, num_tokens in batch if seq.num_computed_tokens < seq.num_prompt_tokens]
        if len(of_prompts) < len(batch):
            sizes.append((len(batch) - len(of_prompts), sum(of_prompts)))
        return run(batch)

    runner.run = run_and_count
    return sizes
