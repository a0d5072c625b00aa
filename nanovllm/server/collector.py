"""When Python collects garbage: a full collection stops every stream for longer than a step, so it waits."""

import gc

PATIENCE = 1000  # collections of younger objects until a full one may run while there is work; Python's default is 10


def hold_back() -> None:
    """Keep all current objects out of collections, and let full ones wait for catch_up(). The others take little."""
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, PATIENCE)


def catch_up() -> None:
    """Run a full collection, if one is due by Python's default. Call this when there is no work."""
    if gc.get_count()[2] > 10:
        gc.collect()
