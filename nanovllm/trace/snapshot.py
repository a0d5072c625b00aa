"""The first line of a trace: what there is, and the state in which it begins."""

import re
from typing import TYPE_CHECKING, Any

from .events import VERSION
from .observer import carried

if TYPE_CHECKING:
    from .batches import BatchObserver
    from .engines import EngineObserver
    from .observer import Observer, Seq


def stage_of(manager: Any) -> str:
    """The name of a stage's folder, or of the package that an engine is from; a subclass is its base's."""
    packages = [cls.__module__ for cls in type(manager).__mro__]
    found = [part for package in packages for part in package.split(".") if re.fullmatch(r"s\d+_\w+", part)]
    return found[0] if found else packages[0].split(".")[0]


def header(observer: "Observer", pool: dict[str, Any], host: dict[str, Any] | None) -> dict[str, Any]:
    config = observer.engine.config
    return {
        "version": VERSION,
        "stage": stage_of(observer.manager),
        "pool": pool,
        "host": host,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": getattr(config, "max_num_batched_tokens", None),
    }


def empty_state() -> dict[str, Any]:
    lists = ("sequences", "waiting", "running", "ref_counts", "free", "host_ref_counts", "host_free")
    return {name: [] for name in lists} | {name: {} for name in ("cached", "host_cached", "loading")}


def batch_snapshot(observer: "BatchObserver") -> dict[str, Any]:
    """Nobody is there: an LLM of static batches is not attached to while it serves."""
    manager, state = observer.manager, empty_state()
    if observer.pool is None:
        return header(observer, {"unit": "slots", "num_blocks": manager.num_slots, "block_size": 1}, None) | {
            "state": state
        }
    pool = {"unit": "blocks", "num_blocks": manager.num_blocks, "block_size": manager.block_size}
    state |= {"ref_counts": [0] * manager.num_blocks, "free": list(observer.pool.pool._free)}
    return header(observer, pool, None) | {"state": state}


def engine_snapshot(observer: "EngineObserver") -> dict[str, Any]:
    """All that are there already are known from now on."""
    manager, scheduler = observer.manager, observer.scheduler
    running, waiting = list(scheduler.running), list(scheduler.waiting)
    sequences = []
    for first in [*running, *waiting]:
        observer.enter(first)
        sequences.append(sequence(observer, first, None))
        for sample in carried(first):
            observer.enter(sample)
            sequences.append(sequence(observer, sample, observer.name(first)))
    names = {"waiting": [observer.name(seq) for seq in waiting], "running": [observer.name(seq) for seq in running]}
    state = empty_state() | {"sequences": sequences} | names | device_state(observer)
    pool = {"unit": "blocks", "num_blocks": manager.num_blocks, "block_size": manager.block_size}
    if observer.host is None:
        return header(observer, pool, None) | {"state": state}
    host = {"num_blocks": observer.engine.host_kv_cache.num_blocks}
    return header(observer, pool, host) | {"state": state | host_state(observer)}


def sequence(observer: "Observer", seq: "Seq", carried_by: str | None) -> dict[str, Any]:
    return {
        "seq": observer.name(seq),
        "request": seq.request_id,
        "tokens": list(seq.token_ids),
        "texts": [observer.text(token_id) for token_id in seq.token_ids],
        "max_num_tokens": seq.max_num_tokens,
        "carried_by": carried_by,
        "num_computed_tokens": seq.num_computed_tokens,
        "block_table": list(seq.block_table),
    }


def device_state(observer: "EngineObserver") -> dict[str, Any]:
    pool, watched = observer.pool.pool, observer.pool
    held = [block for seq in observer.scheduler.running for block in seq.block_table]
    counts = list(pool.ref_counts) if hasattr(pool, "ref_counts") else [held.count(i) for i in range(pool.num_blocks)]
    if hasattr(pool, "cache_block"):
        watched.hashes = {block: hash_.hex() for hash_, block in pool._cached.items()}
    return {"ref_counts": counts, "free": list(pool._free), "cached": as_keys(watched.hashes)}


def host_state(observer: "EngineObserver") -> dict[str, Any]:
    """A text that is on its way is in the index of either tier: so it is known where a load goes."""
    pool, manager, watched = observer.manager._host_pool, observer.manager, observer.host
    watched.hashes = {block: hash_.hex() for hash_, block in pool._cached.items()}
    sources = [block for load in manager._loads for block in load.sources]
    targets = {hash_: block for block, hash_ in observer.pool.hashes.items()}
    watched.loading = {block: targets[watched.hashes[block]] for block in sources}
    return {
        "host_ref_counts": list(pool.ref_counts),
        "host_cached": as_keys(watched.hashes),
        "host_free": list(pool._free),
        "loading": as_keys(watched.loading),
    }


def as_keys(by_block: dict[int, Any]) -> dict[str, Any]:
    """As JSON has it: the keys are texts."""
    return {str(block): value for block, value in by_block.items()}
