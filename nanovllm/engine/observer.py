"""Observer: receives every event of an engine. To trace or draw an engine, pass it an observer of your own."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple


class Observer:
    """An observer that ignores everything. A subclass overrides tell().

    add       seq                      it waits at the end of the queue
    refuse    request_id, error        it cannot be served
    abort     request_id               the caller is about to end it
    store     block, to, hash          this text has left the device: block `to` of the host has it
    renew     block, hash              it has left the device, and this block of the host had it already
    host_evict block, hash, why        the host's block is taken, or all are reset
    load      seq, copies              blocks for seq are on their way from the host
    arrive    copies                   they have arrived
    begin                              a step begins
    admit     seq, hits                it holds its blocks; hits: those that were cached, None for one of the host
    cache     block, hash              the text in this block can be found
    evict     block, hash, why         it cannot be found any more: the block is taken, or all are reset
    fork      parent, child            child holds the blocks of parent too, and runs behind it
    grow      seq, copy                it holds one block more, or its own copy of a shared one
    copy      copies                   these blocks are copied
    wait      seq, why, needed, free   it is first in the queue, and is not admitted in this step
    schedule  output                   these sequences compute so many tokens in this step
    preempt   seq, makes_room_for      it has lost its blocks, and waits at the front of the queue
    step      batch, updated           the new tokens are appended; updated: sequences that have one
    free      seq, blocks              it has given these blocks back
    finish    seq                      it has ended and holds nothing
    raise     batch, error             a step of the model with these raised
    end       error                    the step is over; error: what broke it off, or None
    """

    def tell(self, kind: str, *details: object) -> None:
        """Note an event. The engine's thread calls this right after the thing has happened."""


class Observers(Observer):
    """The observers of an engine. Each receives the events for which it has a method, such as on_admit(seq, hits).

    An observer without such methods receives all events through tell(). An event without receivers costs one lookup.
    Any thread may append and remove observers; the engine's thread calls their methods.
    """

    def __init__(self, *observers: object) -> None:
        self._lock = threading.Lock()  # two threads may append at the same time
        self._observers: list[object] = []
        self._methods = Methods({}, [])
        for observer in observers:
            self.append(observer)

    def tell(self, kind: str, *details: object) -> None:
        """Call on_<kind>(*details) of each observer that has it."""
        methods = self._methods
        if kind in methods.of_kind:
            for method in methods.of_kind[kind]:
                method(*details)
        else:
            for tell in methods.of_any:
                tell(kind, *details)

    def append(self, observer: object) -> None:
        """Send events to `observer` from now on. Raise ValueError if it has no method that receives any."""
        with self._lock:
            self._set([*self._observers, observer])

    def remove(self, observer: object) -> None:
        """Stop sending events to `observer`. Raise ValueError if it is not in the list."""
        with self._lock:
            observers = list(self._observers)
            observers.remove(observer)
            self._set(observers)

    def __iter__(self) -> Iterator[object]:
        return iter(self._observers)

    def __len__(self) -> int:
        return len(self._observers)

    def _set(self, observers: list[object]) -> None:
        """Build new tables, since tell() may be using the old ones in another thread."""
        kinds_of = [[name.removeprefix("on_") for name in dir(each) if name.startswith("on_")] for each in observers]
        of_kind: dict[str, list[Callable[..., None]]] = {kind: [] for kinds in kinds_of for kind in kinds}
        of_any: list[Callable[..., None]] = []
        for observer, kinds in zip(observers, kinds_of, strict=True):
            tell = None if kinds else getattr(observer, "tell", None)
            if not kinds and not callable(tell):
                raise ValueError(f"an observer needs tell() or a method such as on_admit(), got {observer!r}")
            if callable(tell):
                of_any.append(tell)
            for kind, methods in of_kind.items():
                if callable(tell):
                    methods.append(partial(tell, kind))
                elif kind in kinds:
                    methods.append(getattr(observer, f"on_{kind}"))
        self._observers, self._methods = observers, Methods(of_kind, of_any)


class Methods(NamedTuple):
    """The methods to call for each kind of event, in the order of the observers."""

    of_kind: dict[str, list[Callable[..., None]]]
    of_any: list[Callable[..., None]]  # for kinds that are not in of_kind: the tell() methods
