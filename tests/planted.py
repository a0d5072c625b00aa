"""Faults that tests plant into a stage, to see that random histories find them."""

import importlib
from typing import Any, NamedTuple

import pytest

from tests.helpers import ROOT, find_stages
from tests.scripted import Stage


class Planted(NamedTuple):
    stage: int  # its number
    path: str  # module.name or module.Class.name
    new: Any


def forget_all(scheduler: Any) -> None:
    """preempt_all() that lets them go on, with the copies that were never made."""


def evict_hits_first(pool: Any, blocks: list[int]) -> None:
    """touch() that leaves a cached block in the queue of the free ones."""
    for block in blocks:
        pool.ref_counts[block] += 1


def collect_at_once(manager: Any, wait: bool = False) -> None:
    """collect_loads() that takes all to be there."""
    for load in manager._loads:
        manager._host_pool.free_blocks(load.sources)
    manager._loads.clear()


def hash_alone(parent: bytes, token_ids: list[int]) -> bytes:
    """hash_block_tokens() that does not know what came before."""
    return repr(token_ids).encode()


PLANTED = {
    "a piece that does not fit": Planted(1, "slot_manager.SlotManager._first_fit", lambda *_: 0),
    "more is promised than there is": Planted(2, "llm.LLM._can_promise", lambda *_: True),
    "nobody is preempted": Planted(4, "block_manager.BlockManager.can_append", lambda *_: True),
    "no watermark and no seats": Planted(4, "scheduler.Scheduler._may_admit", lambda *_: True),
    "copies are lost": Planted(5, "kv_cache.KVCache.copy_blocks", lambda *_: None),
    "a step that breaks off goes on": Planted(5, "scheduler.Scheduler.preempt_all", forget_all),
    "a shared block is written": Planted(5, "block_manager.BlockManager._is_shared", lambda *_: False),
    "a hash without its prefix": Planted(6, "prefix_cache.hash_block_tokens", hash_alone),
    "a hit stays free": Planted(6, "block_pool.BlockPool.touch", evict_hits_first),
    "nobody waits for a load": Planted(7, "block_manager.BlockManager.is_ready", lambda *_: True),
    "loads have always arrived": Planted(7, "block_manager.BlockManager.collect_loads", collect_at_once),
    "a text is on the host and its bytes are not": Planted(7, "offload.HostKVCache.store", lambda *_: None),
}


def plant(fault: Planted, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Returns the stage that has it until the test ends."""
    name = find_stages(ROOT)[fault.stage - 1]
    module, *owner, attribute = fault.path.split(".")
    target = importlib.import_module(f"{name}.{module}")
    monkeypatch.setattr(getattr(target, owner[0]) if owner else target, attribute, fault.new)
    return Stage(name)
