"""Ranks as threads of one process, which make the same calls, as under torchrun; and engines on them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import HashStore

from ...distributed.rank_group import RankGroup
from ...llm_engine import LLMEngine
from ...options.config import EngineConfig

Result = TypeVar("Result")


def on_ranks(world_size: int, function: Callable[[RankGroup], Result]) -> list[Result]:
    """Return what `function` returns on each rank. Raise the error of the first rank that raises."""
    store = HashStore()

    def run(rank: int) -> Result:
        torch.set_num_threads(1)
        ranks = RankGroup(rank, world_size, store)
        try:
            return function(ranks)
        finally:
            ranks.close()

    with ThreadPoolExecutor(world_size) as threads:
        results = [threads.submit(run, rank) for rank in range(world_size)]
        return [result.result() for result in results]


def engine_on(ranks: RankGroup, checkpoint: Path, **options: Any) -> LLMEngine:
    """Return this rank's engine, or a whole one if there is only one rank."""
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 4, "attention_backend": "torch", "watermark": 0.0}
    settings |= {"offload_policy": "load", "tensor_parallel_size": ranks.world_size}
    return LLMEngine(EngineConfig(str(checkpoint), **settings | options), ranks=ranks)
