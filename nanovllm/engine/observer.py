"""Observer: hears what the engine does, for whoever wants to draw, count or record it."""

from collections.abc import Callable, Iterator
from typing import Any


class Observer:
    """Hears of each thing right after it has happened, in the engine's thread. This one ignores it all.

    An observer may read what it is given, and must not change it.
    """

    def tell(self, kind: str, *details: Any) -> None:
        """Take note of one event: observer.tell("admit", seq, hits)."""


class Observers(Observer):
    """The observers of an engine. Each hears of the events that it has a method for: on_admit(seq, hits), ...

    An event that no observer has a method for costs one look-up. Any thread may append and remove.
    """

    def __init__(self, *observers: object) -> None:
        self._observers: list[object] = []
        self._methods: dict[str, list[Callable[..., None]]] = {}  # by kind, in the order of the observers
        for observer in observers:
            self.append(observer)

    def tell(self, kind: str, *details: Any) -> None:
        """Call on_<kind>(*details) of each observer that has it."""
        methods = self._methods.get(kind)
        if methods:
            for method in methods:
                method(*details)

    def append(self, observer: object) -> None:
        """Let `observer` hear of all that happens from now on."""
        self._set([*self._observers, observer])

    def remove(self, observer: object) -> None:
        """Let `observer` hear of nothing any more. Raise ValueError if it is not one of them."""
        observers = list(self._observers)
        observers.remove(observer)
        self._set(observers)

    def __iter__(self) -> Iterator[object]:
        return iter(self._observers)

    def __len__(self) -> int:
        return len(self._observers)

    def _set(self, observers: list[object]) -> None:
        """Build both tables anew: an event that is being told goes on with the old ones."""
        methods: dict[str, list[Callable[..., None]]] = {}
        for observer in observers:
            for name in dir(observer):
                if name.startswith("on_"):
                    methods.setdefault(name.removeprefix("on_"), []).append(getattr(observer, name))
        self._observers, self._methods = observers, methods
