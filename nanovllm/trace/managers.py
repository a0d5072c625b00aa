"""From stage 4 on: the manager of the blocks, and the copies that it asks for; from 5 forks, from 6 the prefix cache,
from 7 a second tier.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, count
from typing import Any

from .hooks import name_of
from .observer import Observer, Seq, Write, in_words
from .pools import DevicePool, HostPool, Move


class ManagerObserver(Observer):
    """A sequence that the scheduler does not know is a beam of a beam search, which has the engine for itself.

    A beam search has no steps of its own: one ends when the model has computed, and the search goes on.
    """

    def __init__(self, engine: Any, write: Write) -> None:
        super().__init__(engine, write)
        self.scheduler = engine.scheduler
        self.doing: str | None = None  # the scheduler: "schedule", "remove" or "preempt_all"
        self.aborting = False
        self.no_blocks: tuple[Seq, int, int] | None = None  # can_allocate() said no: for whom, needed, free
        self._hits: dict[int, int] = {}  # what find_hits() has found on the device: place in the table, and block
        self._room_for: Seq | None = None  # can_append() said no: somebody is preempted for it
        self._copying: dict[int, Seq] = {}  # of each block that is to be copied to, the holder
        self._forked: tuple[Seq, Seq] | None = None  # the last one: parent, child
        self._num_beams = 0
        self._beams_computed = False

    def watch_parts(self) -> None:
        engine, manager, wrap = self.engine, self.manager, self.hooks.wrap
        for name in ("can_allocate", "can_append", "allocate", "append_slot", "free"):
            wrap(manager, name, getattr(self, f"_{name}"))
        wrap(engine.model_runner, "run", self.run)
        self.pool = DevicePool(self, manager._pool)
        self.host: HostPool | None = None
        if hasattr(manager, "fork"):
            wrap(manager, "fork", self._fork)
            wrap(engine.kv_cache, "copy_blocks", self._copy_blocks)
            if hasattr(engine.model_runner, "compute"):  # a runner without a model may only run
                wrap(engine.model_runner, "compute", self._compute)
        if hasattr(manager, "find_hits"):
            wrap(manager, "find_hits", self._find_hits)
            wrap(manager, "cache_blocks", self._cache_blocks)
        if hasattr(engine, "host_kv_cache"):
            self.host = HostPool(self, manager._host_pool, engine.host_kv_cache, self.pool)

    def forget(self) -> None:
        """What was noted for the rest of a step."""
        self._copying, self._forked, self._room_for, self.no_blocks = {}, None, None, None

    def _can_allocate(self, can_allocate: Callable, seq: Seq, spare: int = 0) -> bool:
        self.no_blocks = None
        can = can_allocate(seq, spare)
        if not can:
            held = [block for block in self._hits.values() if self.pool.count(block)]
            needed = -(-seq.num_tokens // self.manager.block_size) - len(held) + spare
            self.no_blocks = seq, needed, self.manager.num_free_blocks
        return can

    def _find_hits(self, find_hits: Callable, seq: Seq) -> list[Any]:
        """Hits on the device stand in these places of the table; blocks that are taken stand in the others."""
        hits, here = find_hits(seq), self.pool.pool
        self._hits = {i: getattr(hit, "block", hit) for i, hit in enumerate(hits) if getattr(hit, "pool", here) is here}
        self.pool.move.hit_places = iter(self._hits)
        self.pool.move.places = chain(sorted({*range(len(hits))} - {*self._hits}), count(len(hits)))
        return hits

    def _allocate(self, allocate: Callable, seq: Seq) -> None:
        self.settle()
        is_beam = seq not in self.seen
        if is_beam:
            self.arrive(seq, "InputProcessor.process")
        try:
            with self._moving(Move(seq, "admit")):
                allocate(seq)
        except Exception as error:
            if is_beam:  # the scheduler's own wait on
                self.end(seq, "error", in_words(error))
            raise
        self.seen[seq].num_computed_tokens = seq.num_computed_tokens
        self.emit("admit", "Scheduler._admit", seq=self.name(seq), num_computed_tokens=seq.num_computed_tokens)

    def _can_append(self, can_append: Callable, seq: Seq) -> bool:
        can = can_append(seq)
        if not can:
            self._room_for = seq
        return can

    def _append_slot(self, append_slot: Callable, seq: Seq) -> Any:
        self.settle()
        grows = seq.num_tokens > len(seq.block_table) * self.manager.block_size
        place = len(seq.block_table) - (not grows)
        with self._moving(Move(seq, "grow" if grows else "copy", iter([place]))):
            copy = append_slot(seq)
        if copy:
            self._copying[copy.target] = seq
        return copy

    def _copy_blocks(self, copy_blocks: Callable, copies: list[Any]) -> None:
        copy_blocks(copies)
        for copy in copies:
            by, name = name_of(self.engine.kv_cache, "copy_blocks"), self.name(self._copying[copy.target])
            self.emit("copied", by, from_=copy.source, to=copy.target, seq=name)

    def _fork(self, fork: Callable, parent: Seq, child: Seq) -> None:
        self.settle()
        if child not in self.seen:
            self._num_beams += 1
            self.arrive(child, "BeamSearch._fork", parent, f"{child.request_id}.beam{self._num_beams}")
        behind = self._forked[1] if self._forked and self._forked[0] is parent else parent
        names = {"seq": self.name(child), "from_": self.name(parent), "behind": self.name(behind)}
        self.emit("forked", name_of(self.manager, "fork"), **names)
        with self._moving(Move(child, "fork", parent=parent)):
            fork(parent, child)
        self.seen[child].num_computed_tokens = child.num_computed_tokens
        self._forked = parent, child

    def _cache_blocks(self, cache_blocks: Callable, seq: Seq, num_tokens: int) -> None:
        self.tell(until=seq)
        cache_blocks(seq, num_tokens)

    def _free(self, free: Callable, seq: Seq) -> None:
        self.settle()
        self.tell()
        why = {"remove": "abort" if self.aborting else "end", None: "end"}.get(self.doing, "preempt")
        with self._moving(Move(seq, why)):
            free(seq)
        if why == "preempt":
            self._tell_preemption(seq)
        elif self.doing is None:
            self.end(seq, "beam")

    def _tell_preemption(self, seq: Seq) -> None:
        seen = self.seen[seq]
        seen.num_once_computed = max(seen.num_once_computed, seen.num_computed_tokens)
        seen.num_computed_tokens = 0
        is_for = self.name(self._room_for) if self.doing == "schedule" and self._room_for else None
        why = "blocks" if self.doing == "schedule" else "step failed"
        self.emit("preempt", "Scheduler._preempt", seq=seen.name, for_=is_for, why=why)

    @contextmanager
    def _moving(self, move: Move) -> Iterator[None]:
        self.pool.move = move
        try:
            yield
        finally:
            self.pool.move = Move(None, "")

    def _compute(self, compute: Callable, batch: list[tuple[Seq, int]]) -> Any:
        if self.is_open and not self._beams_computed:  # within run()
            return compute(batch)
        self.settle()
        self.open_step()
        try:
            computed = compute(batch)
        except BaseException as error:
            self.close_step(in_words(error))
            raise
        self.computed.extend(seq for seq, _ in batch)
        self._beams_computed = True
        return computed

    def settle(self) -> None:
        """A step of a beam search has ended if the model has computed."""
        if self._beams_computed:
            self._beams_computed = False
            self.close_step(None)
