"""A pool of blocks, on the device and on the host: what is taken, shared, given back, found, evicted and stored."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from .hooks import name_of
from .observer import Observer, Seq


@dataclass
class Move:
    """For whom a pool is asked now, and why."""

    seq: Seq
    why: str
    places: Iterator[int] = field(default_factory=count)  # in its table, of blocks that are taken
    hit_places: Iterator[int] = field(default_factory=count)  # and of blocks that are hit
    parent: Seq | None = None


class DevicePool:
    """Watches the pool of blocks of a BlockManager, from stage 2 on. `move` is set before the pool is asked."""

    def __init__(self, observer: Observer, pool: Any) -> None:
        self.pool, self.move = pool, Move(None, "")
        self.hashes: dict[int, str] = {}  # of each cached block
        self._observer, self._emit = observer, observer.emit
        wrap = observer.hooks.wrap
        wrap(pool, "get_new_blocks", self._take)
        wrap(pool, "free_blocks", self._give_back)
        if hasattr(pool, "touch"):
            wrap(pool, "touch", self._touch)
        if hasattr(pool, "cache_block"):
            wrap(pool, "cache_block", self._cache)
            wrap(pool, "reset_prefix_cache", self._reset)

    def count(self, block: int) -> int:
        """How many hold it. A stage that does not count has one holder at most, and this is asked after it left."""
        return self.pool.ref_counts[block] if hasattr(self.pool, "ref_counts") else 0

    def _take(self, get_new_blocks: Callable, num_blocks: int) -> list[int]:
        blocks, by = get_new_blocks(num_blocks), name_of(self.pool, "get_new_blocks")
        for block in blocks:
            if block in self.hashes:
                self._emit("evicted", by, block=block, hash=self.hashes.pop(block), why="taken")
            place, why = next(self.move.places), self.move.why
            self._emit("taken", by, block=block, seq=self._name(), index=place, why=why)
        return blocks

    def _touch(self, touch: Callable, blocks: list[int]) -> None:
        move, by = self.move, name_of(self.pool, "touch")
        held = [self.count(block) > 0 for block in blocks]
        touch(blocks)
        for block, was_held, place in zip(blocks, held, move.hit_places, strict=False):
            if move.parent:
                fields = {"from_": self._observer.name(move.parent), "why": "fork"}
                self._emit("shared", by, block=block, seq=self._name(), index=place, **fields)
            else:
                was = "held" if was_held else "idle"
                self._emit("hit", by, block=block, seq=self._name(), index=place, was=was)

    def _give_back(self, free_blocks: Callable, blocks: list[int]) -> None:
        blocks = list(blocks)  # the caller may empty its own
        free_blocks(blocks)
        by, why = name_of(self.pool, "free_blocks"), {"admit": "failed"}.get(self.move.why, self.move.why)
        for block in reversed(blocks):  # as the pool does
            self._emit("given_back", by, block=block, seq=self._name(), why=why)
            if self.count(block) == 0 and block in self.hashes:
                self._emit("idle", by, block=block, place="back")
            elif self.count(block) == 0:
                self._emit("free", by, block=block, place="front")

    def _cache(self, cache_block: Callable, block: int, block_hash: bytes) -> None:
        is_new = self.pool.get_cached_block(block_hash) is None
        cache_block(block, block_hash)
        if is_new:
            self.hashes[block] = block_hash.hex()
            self._emit("cached", name_of(self.pool, "cache_block"), block=block, hash=block_hash.hex())

    def _reset(self, reset_prefix_cache: Callable) -> None:
        reset_prefix_cache()
        for block, hash_ in self.hashes.items():
            self._emit("evicted", name_of(self.pool, "reset_prefix_cache"), block=block, hash=hash_, why="reset")
        self.hashes.clear()

    def _name(self) -> str:
        return self._observer.name(self.move.seq)


class HostPool:
    """Watches the second tier, from stage 7 on: its pool, and the copies between the two."""

    def __init__(self, observer: Observer, pool: Any, host: Any, device: DevicePool) -> None:
        self.hashes: dict[int, str] = {}  # of each cached block
        self._observer, self._emit, self._pool, self._host, self._device = observer, observer.emit, pool, host, device
        self.loading: dict[int, int] = {}  # on their way: block of the host, and of the device
        self._new: list[int] = []  # taken, to be stored to
        wrap = observer.hooks.wrap
        wrap(pool, "get_new_blocks", self._take)
        wrap(pool, "free_blocks", self._give_back)
        wrap(pool, "reset_prefix_cache", self._reset)
        wrap(host, "store", self._store)
        wrap(host, "load", self._load)

    def _take(self, get_new_blocks: Callable, num_blocks: int) -> list[int]:
        self._new = get_new_blocks(num_blocks)
        for block in self._new:
            if block in self.hashes:
                by = name_of(self._pool, "get_new_blocks")
                self._emit("host_evicted", by, block=block, hash=self.hashes.pop(block), why="taken")
        return self._new

    def _store(self, store: Callable, copy: Any) -> None:
        store(copy)
        self.hashes[copy.target] = hash_ = self._device.hashes[copy.source]
        self._emit("stored", name_of(self._host, "store"), from_=copy.source, to=copy.target, hash=hash_)

    def _load(self, load: Callable, copies: list[Any]) -> Any:
        loading, by = load(copies), name_of(self._host, "load")
        name = self._observer.name(self._device.move.seq)
        for copy in copies:
            self._emit("loaded", by, from_=copy.source, to=copy.target, seq=name)
        self.loading |= {copy.source: copy.target for copy in copies}
        return loading

    def _give_back(self, free_blocks: Callable, blocks: list[int]) -> None:
        """After a store, after a load has arrived or failed, or to renew the place of a text that is stored."""
        free_blocks(blocks)
        if blocks == self._new:
            self._new = []
            return
        for block in reversed(blocks):  # as the pool does
            if block in self.loading:
                by, to = "BlockManager.collect_loads", self.loading.pop(block)
                self._emit("arrived", by, from_=block, to=to)
            elif self._pool.ref_counts[block] == 0:
                self._emit("renewed", name_of(self._pool, "free_blocks"), to=block, hash=self.hashes[block])

    def _reset(self, reset_prefix_cache: Callable) -> None:
        reset_prefix_cache()
        for block, hash_ in self.hashes.items():
            self._emit("host_evicted", name_of(self._pool, "reset_prefix_cache"), block=block, hash=hash_, why="reset")
        self.hashes.clear()
