"""Sequences and block managers without a model."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...engine.block_manager import BlockManager
from ...engine.block_pool import BlockPool
from ...engine.observer import Observer
from ...engine.prefix_cache import BlockHash
from ...engine.scheduler import Scheduler
from ...engine.sequence import Sequence
from ...engine.tier import Tier
from ...requests.sampling_params import SamplingParams
from ...tiers.host_tier import HostTier


def make_sequence(request_id: str, num_prompt_tokens: int, max_tokens: int, sample_index: int = 0) -> Sequence:
    """Return a sample of a request with this many tokens, for tests without a model."""
    return Sequence(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=[7] * num_prompt_tokens,
        params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        stop_token_ids=set(),
        max_num_tokens=num_prompt_tokens + max_tokens,
        sample_index=sample_index,
    )


def make_samples(request_id: str, num_prompt_tokens: int, max_tokens: int, n: int) -> list[Sequence]:
    """Return the samples of a request, of which the first carries the others."""
    first, *others = [make_sequence(request_id, num_prompt_tokens, max_tokens, i) for i in range(n)]
    first.to_fork = others
    return [first, *others]


def make_manager(
    num_blocks: int,
    block_size: int = 4,
    is_caching: bool = False,
    tier: Tier | None = None,
    observer: Observer | None = None,
) -> BlockManager:
    """Return a BlockManager without tensors, and by default without a second tier."""
    observer = observer or Observer()
    tier = tier or HostTier(torch.empty(num_blocks, 1), 0, observer)
    return BlockManager(num_blocks, block_size, is_caching, tier, observer)


def admit(manager: BlockManager, seq: Sequence) -> Sequence:
    """Allocate blocks for all tokens of `seq`, cached ones first."""
    manager.allocate(seq, manager.find_hits(seq))
    return seq


def fits(manager: BlockManager, seq: Sequence, spare: int = 0) -> bool:
    """Return True if allocate() would succeed and leave `spare` blocks free."""
    return manager.num_needed(seq, manager.find_hits(seq)) + spare <= manager.num_free_blocks


def holders(manager: Any) -> set[Any]:
    """Return the sequences that hold blocks in a manager of the package or of a stage."""
    return manager._holders  # noqa: SLF001 - a report tells blocks, not their holders


def name_requests(llm: Any, request_ids: Iterator[str]) -> None:
    """Name the next requests of an LLM of the package or of a stage."""
    llm._request_ids = request_ids  # noqa: SLF001 - it counts them, and histories need names that are not taken


def on_evict(pool: BlockPool, function: Callable[[int, BlockHash], None]) -> None:
    """Call `function` for each cached block that the pool is about to take."""
    pool._on_evict = function  # noqa: SLF001 - pools are built by managers, which pass their own


def preempt(scheduler: Scheduler, seq: Sequence) -> None:
    """Preempt a running sequence, as if the pool were full."""
    scheduler._preempt(seq, None)  # noqa: SLF001 - a full pool would choose another one
