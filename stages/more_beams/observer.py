"""Observer: receives every event of an engine. To trace or draw an engine, pass it an observer of your own."""


class Observer:
    """An observer that ignores everything. A subclass overrides tell().

    add       seq                      it waits at the end of the queue
    refuse    request_id, error        it cannot be served
    abort     request_id               the caller is about to end it
    begin                              a step begins
    admit     seq                      it holds its blocks
    fork      parent, child            child holds the blocks of parent, too, and directly follows it in `running`
    grow      seq, copy                it holds one block more, or its own copy of a shared one
    copy      copies                   these blocks are copied
    wait      seq, why, needed, free   it is first in the queue, and is not admitted in this step
    schedule  output                   the sequences of this step, and how many tokens each computes
    preempt   seq, makes_room_for      it has lost its blocks, and waits at the front of the queue
    step      batch, updated           the new tokens are appended; updated: the sequences that got a token
    free      seq, blocks              it has given these blocks back
    finish    seq                      it has ended and holds nothing
    end                                the step is over
    """

    def tell(self, kind: str, *details: object) -> None:
        """Record an event. The engine's thread calls this right after it has happened."""
