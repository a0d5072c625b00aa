"""From stage 4 on: an LLMEngine with a scheduler; from 5 forks, from 6 a prefix cache, from 7 a second tier."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, count
from typing import Any

from ..core.interrupts import interrupts_held_back
from .hooks import name_of
from .observer import Observer, Seq, Write, in_words
from .pools import DevicePool, HostPool, Move
from .snapshot import engine_snapshot


class EngineObserver(Observer):
    """The scheduler's queues change only in its public methods: what a call of the manager is for is known by them.

    A sequence that the scheduler does not know is a beam of a beam search, which has the engine for itself.
    """

    def __init__(self, engine: Any, write: Write) -> None:
        super().__init__(engine, write)
        self.scheduler = engine.scheduler
        self._doing: str | None = None  # the scheduler: "schedule", "remove" or "preempt_all"
        self._aborting = False
        self._leaving: list[Seq] = []  # they have left the scheduler, and are about to end
        self._hits: dict[int, int] = {}  # what find_hits() has found on the device: place in the table, and block
        self._no_blocks: tuple[Seq, int, int] | None = None  # can_allocate() said no: for whom, needed, free
        self._room_for: Seq | None = None  # can_append() said no: somebody is preempted for it
        self._copying: dict[int, Seq] = {}  # of each block that is to be copied to, the holder
        self._forked: tuple[Seq, Seq] | None = None  # the last one: parent, child
        self._num_beams = 0
        self._beams_computed = False  # a step of a beam search, which ends when the search goes on

    def begin(self) -> None:
        engine, scheduler, manager, wrap = self.engine, self.scheduler, self.manager, self.hooks.wrap
        for name in ("step", "add_request", "abort_request"):
            wrap(engine, name, getattr(self, f"_{name}"))
        for name in ("add", "remove", "schedule"):
            wrap(scheduler, name, getattr(self, f"_{name}"))
        for name in ("can_allocate", "can_append", "allocate", "append_slot", "free"):
            wrap(manager, name, getattr(self, f"_{name}"))
        wrap(engine.model_runner, "run", self.run)
        self.pool = DevicePool(self, manager._pool)
        self.host: HostPool | None = None
        if hasattr(manager, "fork"):
            wrap(scheduler, "preempt_all", self._preempt_all)
            wrap(manager, "fork", self._fork)
            wrap(engine.kv_cache, "copy_blocks", self._copy_blocks)
            wrap(engine.model_runner, "compute", self._compute)
        if hasattr(manager, "find_hits"):
            wrap(manager, "find_hits", self._find_hits)
            wrap(manager, "cache_blocks", self._cache_blocks)
        if hasattr(engine, "host_kv_cache"):
            self.host = HostPool(self, manager._host_pool, engine.host_kv_cache, self.pool)
        self.emit("snapshot", None, **engine_snapshot(self))

    def close(self) -> None:
        self._settle()
        super().close()

    # The engine

    def _step(self, step: Callable) -> list[Any]:
        with interrupts_held_back():  # an event is told as a whole
            self._settle()
            self.open_step()
            error = None
            try:
                return step()
            except BaseException as raised:
                error = in_words(raised)
                raise
            finally:
                self.close_step(error)

    def close_step(self, error: str | None) -> None:
        if self.is_open:
            self.tell()
            self._tell_ends()
            self._copying, self._forked, self._room_for, self._no_blocks = {}, None, None, None
        super().close_step(error)

    def _add_request(self, add_request: Callable, request_id: str, *rest: Any, **named: Any) -> None:
        with interrupts_held_back():
            self._settle()
            try:
                add_request(request_id, *rest, **named)
            except ValueError as error:
                self.emit("refused", name_of(self.engine, "add_request"), request=request_id, why=str(error))
                raise

    def _abort_request(self, abort_request: Callable, request_id: str) -> Any:
        with interrupts_held_back():
            self._settle()
            if any(seq.request_id == request_id for seq in self.seen):
                self.emit("abort", name_of(self.engine, "abort_request"), request=request_id)
            self._aborting = True
            try:
                return abort_request(request_id)
            finally:
                self._aborting = False
                self._tell_ends()

    # The scheduler

    @contextmanager
    def _doing_so(self, what: str) -> Iterator[None]:
        before, self._doing = self._doing, what
        try:
            yield
        finally:
            self._doing = before

    def _add(self, add: Callable, seq: Seq) -> None:
        add(seq)
        by = name_of(self.scheduler, "add")
        self.arrive(seq, by)
        for sample in carried(seq):
            self.arrive(sample, by, carried_by=seq)

    def _remove(self, remove: Callable, seq: Seq) -> None:
        self.tell()
        with self._doing_so("remove"):
            remove(seq)
        self._leaving += [seq, *carried(seq)]
        self._tell_ends()

    def _tell_ends(self) -> None:
        """Some end before they leave, and some after."""
        for seq in self._leaving:
            if seq.finished:
                self.end(seq)
        self._leaving = [seq for seq in self._leaving if not seq.finished]

    def _schedule(self, schedule: Callable) -> Any:
        num_preemptions = self.scheduler.num_preemptions
        with self._doing_so("schedule"):
            output = schedule()
        self._tell_ends()
        if self.scheduler.waiting:
            first = next(iter(self.scheduler.waiting))
            preempted = self.scheduler.num_preemptions > num_preemptions
            why, needed, free = self._why_not(first, output, preempted)
            by = "Scheduler._admit" if why in ("blocks", "seat", "budget") else "Scheduler.schedule"
            self.emit("held_up", by, seq=self.name(first), why=why, needed=needed, free=free)
        return output

    def _why_not(self, seq: Seq, output: Any, preempted: bool) -> tuple[str, int | None, int | None]:
        """Why the first that waits was not admitted; what it needs, and what there is. In the scheduler's order."""
        config = self.engine.config
        if preempted or output.failed:
            return "preemption" if preempted else "failure", None, None
        budget = config.max_num_batched_tokens - sum(num_tokens for _, num_tokens in output.batch)
        if budget == 0:
            return "budget", seq.num_uncomputed_tokens, budget
        if self._no_blocks and self._no_blocks[0] is seq:
            return "blocks", *self._no_blocks[1:]
        taken = sum(1 + len(carried(other)) for other in self.scheduler.running)
        return "seat", 1 + len(carried(seq)), config.max_num_seqs - taken

    def _preempt_all(self, preempt_all: Callable) -> None:
        with self._doing_so("preempt_all"):
            preempt_all()

    # The manager

    def _can_allocate(self, can_allocate: Callable, seq: Seq, spare: int = 0) -> bool:
        self._no_blocks = None
        can = can_allocate(seq, spare)
        if not can:
            held = [block for block in self._hits.values() if self.pool.count(block)]
            needed = -(-seq.num_tokens // self.manager.block_size) - len(held) + spare
            self._no_blocks = seq, needed, self.manager.num_free_blocks
        return can

    def _find_hits(self, find_hits: Callable, seq: Seq) -> list[Any]:
        """Hits on the device stand in these places of the table; blocks that are taken stand in the others."""
        hits, here = find_hits(seq), self.pool.pool
        self._hits = {i: getattr(hit, "block", hit) for i, hit in enumerate(hits) if getattr(hit, "pool", here) is here}
        self.pool.move.hit_places = iter(self._hits)
        self.pool.move.places = chain(sorted({*range(len(hits))} - {*self._hits}), count(len(hits)))
        return hits

    def _allocate(self, allocate: Callable, seq: Seq) -> None:
        self._settle()
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
        self._settle()
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
        self._settle()
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
        self._settle()
        self.tell()
        why = {"remove": "abort" if self._aborting else "end", None: "end"}.get(self._doing, "preempt")
        with self._moving(Move(seq, why)):
            free(seq)
        if why == "preempt":
            self._tell_preemption(seq)
        elif self._doing is None:
            self.end(seq, "beam")

    def _tell_preemption(self, seq: Seq) -> None:
        seen = self.seen[seq]
        seen.num_once_computed = max(seen.num_once_computed, seen.num_computed_tokens)
        seen.num_computed_tokens = 0
        is_for = self.name(self._room_for) if self._doing == "schedule" and self._room_for else None
        why = "blocks" if self._doing == "schedule" else "step failed"
        self.emit("preempt", "Scheduler._preempt", seq=seen.name, for_=is_for, why=why)

    @contextmanager
    def _moving(self, move: Move) -> Iterator[None]:
        self.pool.move = move
        try:
            yield
        finally:
            self.pool.move = Move(None, "")

    # A beam search has no steps of its own: one ends when the model has computed, and the search goes on

    def _compute(self, compute: Callable, batch: list[tuple[Seq, int]]) -> Any:
        if self.is_open and not self._beams_computed:  # within run()
            return compute(batch)
        self._settle()
        self.open_step()
        self._beams_computed = True
        computed = compute(batch)
        self._computed.extend(seq for seq, _ in batch)
        return computed

    def _settle(self) -> None:
        if self._beams_computed:
            self._beams_computed = False
            self.close_step(None)


def carried(seq: Seq) -> list[Seq]:
    """The samples that wait for it to compute their prompt; from stage 5 on."""
    return getattr(seq, "to_fork", [])
