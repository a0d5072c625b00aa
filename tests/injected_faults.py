"""Faults that tests inject into a stage, to check that random histories find them."""

import importlib
from typing import Any, NamedTuple

import pytest

from tests.helpers import ROOT, find_stages
from tests.scripted_llm import Stage


class InjectedFault(NamedTuple):
    stage: int  # its number
    path: str  # module.name or module.Class.name
    new: Any


def keep_hits_free(pool: Any, blocks: list[int]) -> None:
    """Add holders, but leave cached blocks in the free queue."""
    for block in blocks:
        pool.ref_counts[block] += 1


def collect_at_once(tier: Any, wait: bool = False) -> list[int]:
    """Finish all loads, even if they have not arrived."""
    targets = [copy.target for load in tier.loads for copy in load.copies]
    tier.release([copy.source for load in tier.loads for copy in load.copies])
    tier.loads.clear()
    return targets


def store_no_bytes(tier: Any, block: int, block_hash: bytes) -> None:
    """Add a text to the tier without copying its block."""
    if block_hash not in tier and tier.pool.free:
        [target] = tier.pool.get_new_blocks(1)
        tier.pool.cache_block(target, block_hash)
        tier.pool.free_blocks([target])


def hash_alone(parent: bytes, token_ids: list[int]) -> bytes:
    """Hash a block by its own tokens, ignoring its prefix."""
    return repr(token_ids).encode()


INJECTED_FAULTS = {
    "a piece that does not fit": InjectedFault(1, "slot_manager.SlotManager._first_fit", lambda *_: 0),
    "promises exceed the pool": InjectedFault(2, "block_manager.BlockManager.can_promise", lambda *_: True),
    "no sequence is preempted": InjectedFault(4, "block_manager.BlockManager.can_append", lambda *_: True),
    "watermark and max_num_seqs are ignored": InjectedFault(4, "scheduler.Scheduler._may_admit", lambda *_: True),
    "copies are lost": InjectedFault(5, "kv_cache.KVCache.copy_blocks", lambda *_: None),
    "a shared block is written": InjectedFault(5, "block_manager.BlockManager._is_shared", lambda *_: False),
    "a hash without its prefix": InjectedFault(6, "prefix_cache.hash_block_tokens", hash_alone),
    "a hit stays in the free queue": InjectedFault(6, "block_pool.BlockPool.touch", keep_hits_free),
    "no sequence waits for a load": InjectedFault(7, "block_manager.BlockManager.is_ready", lambda *_: True),
    "loads have always arrived": InjectedFault(7, "host_tier.HostTier.collect", collect_at_once),
    "a stored text has no bytes on the host": InjectedFault(7, "host_tier.HostTier.store", store_no_bytes),
}


def inject(fault: InjectedFault, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Inject a fault until the test ends, and return its stage."""
    name = find_stages(ROOT)[fault.stage - 1]
    module, *owner, attribute = fault.path.split(".")
    target = importlib.import_module(f"{name}.{module}")
    monkeypatch.setattr(getattr(target, owner[0]) if owner else target, attribute, fault.new)
    return Stage(name)
