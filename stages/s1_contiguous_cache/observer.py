"""Observer: receives every event of an engine. To trace or draw an engine, pass it an observer of your own."""


class Observer:
    """An observer that ignores everything. A subclass overrides tell().

    add       seq                      it waits at the end of the queue
    refuse    request_id, error        it cannot be served
    begin                              a step begins
    admit     seq                      it holds its slots
    wait      seq, why, needed, free   it is first in the queue, and is not admitted in this step
    schedule  batch                    the sequences of this step, and how many tokens each computes
    step      batch, updated           the new tokens are appended; updated: the sequences that got a token
    free      seq, slots               it has given these slots back
    finish    seq                      it has ended and holds nothing
    end                                the step is over
    """

    def tell(self, kind: str, *details: object) -> None:
        """Record an event. The engine's thread calls this right after it has happened."""
