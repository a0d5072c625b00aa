"""Observer: receives every event of an engine. To trace or draw an engine, pass it an observer of your own."""

from collections.abc import Callable, Iterator


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
    """The observers of an engine. Each receives the events that it has a method for, such as on_admit(seq, hits).

    An event without such a method costs one lookup. Any thread may append and remove.
    """

    def __init__(self, *observers: object) -> None:
        self._observers: list[object] = []
        self._methods: dict[str, list[Callable[..., None]]] = {}  # by kind, in the order of the observers
        for observer in observers:
            self.append(observer)

    def tell(self, kind: str, *details: object) -> None:
        """Call on_<kind>(*details) of each observer that has it."""
        methods = self._methods.get(kind)
        if methods:
            for method in methods:
                method(*details)

    def append(self, observer: object) -> None:
        """Pass `observer` the events from now on."""
        self._set([*self._observers, observer])

    def remove(self, observer: object) -> None:
        """Pass `observer` no more events. Raise ValueError if it is not one of these."""
        observers = list(self._observers)
        observers.remove(observer)
        self._set(observers)

    def __iter__(self) -> Iterator[object]:
        return iter(self._observers)

    def __len__(self) -> int:
        return len(self._observers)

    def _set(self, observers: list[object]) -> None:
        """Build both tables anew: tell() may be at work with the old ones."""
        methods: dict[str, list[Callable[..., None]]] = {}
        for observer in observers:
            for name in dir(observer):
                if name.startswith("on_"):
                    methods.setdefault(name.removeprefix("on_"), []).append(getattr(observer, name))
        self._observers, self._methods = observers, methods
