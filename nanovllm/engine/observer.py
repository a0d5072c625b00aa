"""Observer: receives every event of an engine. To trace or draw an engine, pass it an observer of your own."""

from collections.abc import Callable, Iterator
from functools import partial


class Observer:
    """An observer that ignores everything. A subclass overrides tell().

    add       seq                      seq waits at the end of the queue
    refuse    request_id, error        the request cannot be served
    abort     request_id               the caller is about to end the request
    store     block, to, hash          a block was evicted from the device, and block `to` of the host has a copy
    renew     block, hash              a block was evicted from the device, and this block of the host had it already
    host_evict block, hash, why        this block of the host is taken, or all blocks of the host are reset
    disk_store hash                    a file has a copy of a block
    disk_drop hash                     a block is not copied to a file, because no buffer is free
    disk_evict hash                    the file of a block was removed, because other blocks need the space
    load      seq, copies              blocks for seq are on their way from the host or the disk
    arrive    copies                   the blocks of these copies have arrived
    timed     tier, num_blocks, seconds  loading num_blocks blocks from `tier` ("host" or "disk") took this long
    disk_bad  hash, error              a block could not be read from its file
    lose      blocks                   these blocks did not arrive; sequences that hold one are about to be preempted
    begin                              a step begins
    admit     seq, hits                seq holds its blocks; hits: its cached blocks, None for a block from a tier
    cache     block, hash              the block enters the prefix cache
    evict     block, hash, why         the block leaves the prefix cache: it is taken or lost, or all blocks are reset
    fork      parent, child            child holds the blocks of parent, too, and directly follows it in `running`
    grow      seq, copy                seq holds one more block, or its own copy of a shared one
    draft     seq                      the step computes guesses of the next tokens of seq, seq.draft_token_ids
    verify    seq, drafted, accepted   `drafted` tokens of the draft were computed, and `accepted` of them were right
    trim      seq, blocks              seq has given back these blocks, which its draft had taken
    copy      copies                   these blocks are copied
    wait      seq, why, needed, free   seq is first in the queue, but is not admitted in this step
    schedule  output                   the sequences of this step, and how many tokens each computes
    preempt   seq, makes_room_for      seq has lost its blocks, and waits at the front of the queue
    step      batch, updated           the new tokens are appended; updated: the sequences that got a token
    free      seq, blocks              seq has given these blocks back
    finish    seq                      seq has ended and holds nothing
    raise     batch, error             a step of the model raised an error with these sequences
    end       error                    the step is over; error: the error that ended it early, or None
    """

    def tell(self, kind: str, *details: object) -> None:
        """Receive an event. The engine's thread calls this method."""


class Observers(Observer):
    """The observers of an engine. Each receives the events for which it has a method, such as on_admit(seq, hits).

    An observer's tell() receives the other events. Any thread may append and remove observers; the engine's thread
    calls their methods.
    """

    def __init__(self, *observers: object) -> None:
        self._observers: list[object] = []
        self._methods: dict[str, list[Callable[..., object]]] = {}  # by kind of event, in the order of the observers
        for observer in observers:
            self.append(observer)

    def tell(self, kind: str, *details: object) -> None:
        """Send an event to the method of each observer that handles its kind, or else to its own tell method."""
        methods = self._methods
        if kind not in methods:
            methods[kind] = [method for each in self._observers if (method := method_for(each, kind))]
        for method in methods[kind]:
            method(*details)

    def append(self, observer: object) -> None:
        """Send events to `observer` from now on. Raise ValueError if it has no method that receives any."""
        if not any(name == "tell" or name.startswith("on_") for name in dir(observer)):
            raise ValueError(f"an observer needs tell() or a method such as on_admit(), got {observer!r}")
        self._observers.append(observer)
        self._methods = {}  # a new dict, set last: tell() may be filling the old dict in another thread

    def remove(self, observer: object) -> None:
        """Stop sending events to `observer`. Raise ValueError if it is not in the list."""
        self._observers.remove(observer)
        self._methods = {}

    def __iter__(self) -> Iterator[object]:
        return iter(self._observers)

    def __len__(self) -> int:
        return len(self._observers)


def method_for(observer: object, kind: str) -> Callable[..., object] | None:
    """Return the method of `observer` that receives events of this kind, or None."""
    tell = getattr(observer, "tell", None)
    method: Callable[..., object] | None = getattr(observer, f"on_{kind}", tell and partial(tell, kind))
    return method
