"""Stages 1 to 3: an LLM that serves static batches. Its queues are variables of a generator: who waits is known by what
happened.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from typing import Any

from ..engine.interrupts import interrupts_held_back
from .hooks import name_of
from .observer import Observer, Seq, Write, in_words
from .pools import DevicePool, Move
from .snapshot import batch_snapshot


class BatchObserver(Observer):
    """A step takes in the next batch if nobody is left, and computes a token of each member."""

    def __init__(self, engine: Any, write: Write) -> None:
        super().__init__(engine, write)
        self.pool: DevicePool | None = None  # none in stage 1
        self._arriving: list[Any] = []  # requests of a stream that has just begun
        self._waiting: dict[Seq, None] = {}  # in order

    def begin(self) -> None:
        llm, wrap = self.engine, self.hooks.wrap
        if llm._is_streaming:
            raise ValueError("a stream() of this LLM is open: it can be traced before that begins")
        for name in ("_serve", "_admit", "_step"):
            wrap(llm, name, getattr(self, name))
        for name in ("allocate", "append_slot", "free"):
            wrap(self.manager, name, getattr(self, f"_{name}"))
        wrap(llm.model_runner, "run", self.run)
        if hasattr(self.manager, "_pool"):
            self.pool = DevicePool(self, self.manager._pool)
        self.emit("snapshot", None, **batch_snapshot(self))

    # The stream

    def _serve(self, serve: Callable, requests: list[Any]) -> Iterator[Any]:
        """Requests arrive when their stream has begun; those that are left when it is closed are aborted."""
        self._arriving = requests
        with closing(serve(requests)) as outputs:
            try:
                for output in outputs:
                    self._arrive()
                    yield output
            except GeneratorExit:
                self._leave(requests, outputs, "abort")
                raise
            except BaseException as error:
                self._leave(requests, outputs, "error", in_words(error))
                raise
            finally:
                self._arriving = []

    def _arrive(self) -> None:
        with interrupts_held_back():
            requests, self._arriving = self._arriving, []
            for request in requests:
                if is_sequence(request):
                    self.arrive(request, "LLM._add_request")
                    self._waiting[request] = None
                else:  # an output that says why not
                    self.emit("refused", "LLM._add_request", request=request.request_id, why=request.error)

    def join(self, request: Any) -> None:
        """Somebody has put `request` in the queue while a batch runs: a stream takes all of its own when it begins."""
        self._arriving.append(request)
        self._arrive()

    def _leave(self, requests: list[Any], outputs: Any, why: str, error: str | None = None) -> None:
        """The stream was closed, or has broken off: what its requests hold is given back."""
        with interrupts_held_back():
            left = [request for request in requests if is_sequence(request) and request in self.seen]
            for seq in left if why == "abort" else []:
                self.emit("abort", "LLM.stream", request=seq.request_id)
            outputs.close()
            for seq in left:
                self._waiting.pop(seq, None)
                self.end(seq, why, error)

    # A step

    def _admit(self, admit: Callable, waiting: Any) -> list[Seq]:
        self._arrive()
        self.open_step()
        batch: list[Seq] = []
        try:
            batch = admit(waiting)
        except BaseException as error:
            self.close_step(in_words(error))
            raise
        if self._waiting:
            self._held_up(*self._why_not(next(iter(self._waiting)), len(batch)))
        return batch

    def _why_not(self, seq: Seq, num_admitted: int) -> tuple[str, int, int]:
        """Why the first that waits is not in the batch; what it needs, and what there is."""
        manager = self.manager
        if num_admitted == self.engine.config.max_num_seqs:
            return "seat", 1, 0
        if self.pool is None:
            return "piece", manager.num_reserved(seq), manager.report().largest_free
        needed, promised = -(-seq.max_num_tokens // manager.block_size), manager.report().promised
        return "promise", needed, manager.num_blocks - promised // manager.block_size

    def _held_up(self, why: str, needed: int | None = None, free: int | None = None) -> None:
        name = self.name(next(iter(self._waiting)))
        self.emit("held_up", name_of(self.engine, "_admit"), seq=name, why=why, needed=needed, free=free)

    def _step(self, step: Callable, running: list[Seq]) -> list[Any]:
        if not self.is_open:
            self.open_step()
            if self._waiting:
                self._held_up("batch")
        error = None
        try:
            return step(running)
        except BaseException as raised:
            error = in_words(raised)
            raise
        finally:
            self.close_step(error)

    # The manager

    def _allocate(self, allocate: Callable, seq: Seq) -> None:
        self._move(seq, "admit")
        allocate(seq)
        if self.pool is None:
            self._tell_piece("reserved", "allocate", seq, seq.slots)
        del self._waiting[seq]
        self.emit("admit", name_of(self.engine, "_admit"), seq=self.name(seq), num_computed_tokens=0)

    def _append_slot(self, append_slot: Callable, seq: Seq) -> None:
        self._move(seq, "grow", len(seq.block_table) if self.pool else 0)
        append_slot(seq)

    def _free(self, free: Callable, seq: Seq) -> None:
        self.tell()
        self._move(seq, "end" if seq.finished else "abort")
        piece = seq.slots if self.pool is None else None
        free(seq)
        if piece:
            self._tell_piece("released", "free", seq, piece)
        if seq.finished:
            self.end(seq)

    def _move(self, seq: Seq, why: str, place: int = 0) -> None:
        if self.pool:
            self.pool.move = Move(seq, why, count(place))

    def _tell_piece(self, kind: str, method: str, seq: Seq, piece: Any) -> None:
        self.emit(kind, name_of(self.manager, method), seq=self.name(seq), start=piece.start, end=piece.end)


def is_sequence(request: Any) -> bool:
    """Else it is the output of a request that cannot be served."""
    return hasattr(request, "token_ids")
