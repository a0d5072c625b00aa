"""From stage 4 on: an LLMEngine, and its scheduler."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ..engine.interrupts import interrupts_held_back
from .hooks import name_of
from .managers import ManagerObserver
from .observer import Seq, Write, carried, in_words
from .snapshot import engine_snapshot


class EngineObserver(ManagerObserver):
    """The scheduler's queues change only in its public methods: what the manager is called for is known by them."""

    def __init__(self, engine: Any, write: Write) -> None:
        super().__init__(engine, write)
        self._leaving: list[Seq] = []  # they have left the scheduler, and are about to end

    def begin(self) -> None:
        wrap = self.hooks.wrap
        for name in ("step", "add_request", "abort_request"):
            wrap(self.engine, name, getattr(self, f"_{name}"))
        for name in ("add", "remove", "schedule"):
            wrap(self.scheduler, name, getattr(self, f"_{name}"))
        if hasattr(self.scheduler, "preempt_all"):
            wrap(self.scheduler, "preempt_all", self._preempt_all)
        self.watch_parts()
        self.emit("snapshot", None, **engine_snapshot(self))

    def close(self) -> None:
        self.settle()
        super().close()

    # The engine

    def _step(self, step: Callable) -> list[Any]:
        with interrupts_held_back():  # an event is told as a whole
            self.settle()
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
            self.forget()
        super().close_step(error)

    def _add_request(self, add_request: Callable, request_id: str, *rest: Any, **named: Any) -> None:
        with interrupts_held_back():
            self.settle()
            try:
                add_request(request_id, *rest, **named)
            except ValueError as error:
                self.emit("refused", name_of(self.engine, "add_request"), request=request_id, why=str(error))
                raise

    def _abort_request(self, abort_request: Callable, request_ids: str | Iterable[str], *rest: Any) -> Any:
        with interrupts_held_back():
            self.settle()
            ids = [request_ids] if isinstance(request_ids, str) else [*request_ids]
            for request_id in {seq.request_id: None for seq in self.seen if seq.request_id in ids}:
                self.emit("abort", name_of(self.engine, "abort_request"), request=request_id)
            self.aborting = True
            try:
                return abort_request(request_ids if isinstance(request_ids, str) else ids, *rest)
            finally:
                self.aborting = False
                self._tell_ends()

    # The scheduler

    @contextmanager
    def _while_doing(self, what: str) -> Iterator[None]:
        before, self.doing = self.doing, what
        try:
            yield
        finally:
            self.doing = before

    def _add(self, add: Callable, seq: Seq) -> None:
        add(seq)
        by = name_of(self.scheduler, "add")
        self.arrive(seq, by)
        for sample in carried(seq):
            self.arrive(sample, by, carried_by=seq)

    def _remove(self, remove: Callable, seq: Seq) -> None:
        self.tell()
        with self._while_doing("remove"):
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
        with self._while_doing("schedule"):
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
        if self.no_blocks and self.no_blocks[0] is seq:
            return "blocks", *self.no_blocks[1:]
        taken = sum(1 + len(carried(other)) for other in self.scheduler.running)
        return "seat", 1 + len(carried(seq)), config.max_num_seqs - taken

    def _preempt_all(self, preempt_all: Callable) -> None:
        with self._while_doing("preempt_all"):
            preempt_all()
