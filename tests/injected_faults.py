"""Faults that tests plant into a stage, to see that random histories find them."""

import importlib
from typing import Any, NamedTuple

import pytest

from tests.helpers import ROOT, find_stages
from tests.scripted_llm import Stage


class Planted(NamedTuple):
    stage: int  # its number
    path: str  # module.name or module.Class.name
    new: Any


def keep_hits_free(pool: Any, blocks: list[int]) -> None:
    """Add holders, and leave cached blocks in the queue of the free ones."""
    for block in blocks:
        pool.ref_counts[block] += 1


def collect_at_once(tier: Any, wait: bool = False) -> list[int]:
    """Finish all loads, whether or not they have arrived."""
    targets = [copy.target for load in tier.loads for copy in load.copies]
    tier.release([copy.source for load in tier.loads for copy in load.copies])
    tier.loads.clear()
    return targets


def store_no_bytes(tier: Any, block: int, block_hash: bytes) -> None:
    """Add a text to the tier, and copy nothing."""
    if block_hash not in tier and tier.pool.free:
        [target] = tier.pool.get_new_blocks(1)
        tier.pool.cache_block(target, block_hash)
        tier.pool.free_blocks([target])


def hash_alone(parent: bytes, token_ids: list[int]) -> bytes:
    """Hash a block by its own tokens, whatever is before it."""
    return repr(token_ids).encode()


PLANTED = {
    "a piece that does not fit": Planted(1, "slot_manager.SlotManager._first_fit", lambda *_: 0),
    "more is promised than there is": Planted(2, "block_manager.BlockManager.can_promise", lambda *_: True),
    "nobody is preempted": Planted(4, "block_manager.BlockManager.can_append", lambda *_: True),
    "no watermark and no seats": Planted(4, "scheduler.Scheduler._may_admit", lambda *_: True),
    "copies are lost": Planted(5, "kv_cache.KVCache.copy_blocks", lambda *_: None),
    "a shared block is written": Planted(5, "block_manager.BlockManager._is_shared", lambda *_: False),
    "a hash without its prefix": Planted(6, "prefix_cache.hash_block_tokens", hash_alone),
    "a hit stays free": Planted(6, "block_pool.BlockPool.touch", keep_hits_free),
    "nobody waits for a load": Planted(7, "block_manager.BlockManager.is_ready", lambda *_: True),
    "loads have always arrived": Planted(7, "host_tier.HostTier.collect", collect_at_once),
    "a text is on the host and its bytes are not": Planted(7, "host_tier.HostTier.store", store_no_bytes),
}


def plant(fault: Planted, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Returns the stage that has it until the test ends."""
    name = find_stages(ROOT)[fault.stage - 1]
    module, *owner, attribute = fault.path.split(".")
    target = importlib.import_module(f"{name}.{module}")
    monkeypatch.setattr(getattr(target, owner[0]) if owner else target, attribute, fault.new)
    return Stage(name)
