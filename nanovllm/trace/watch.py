"""Watch: the events of an engine that serves, while somebody looks. Else nothing is left in the engine."""

from typing import Any

from .observer import Observer, observe

Event = dict[str, Any]


class Watch:
    """It is called in the engine's thread, between two steps."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._observer: Observer | None = None
        self._events: list[Event] = []

    def on(self, show_text: bool) -> None:
        """Look from now on, as if for the first time: a snapshot comes next."""
        self.off()
        self._observer = observe(self._engine, self._append, show_text)

    def off(self) -> None:
        """What has not been taken is lost."""
        if self._observer:
            self._observer.close()
        self._observer, self._events = None, []

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take(self) -> list[Event] | None:
        """The events since the last time; None if there are none. Raises what went wrong in noting them."""
        if self._observer and self._observer.error:
            raise self._observer.error
        events, self._events = self._events, []
        return events or None

    def _append(self, event: Event) -> None:
        self._events.append(event)
