"""The state of the API server that all requests share."""

import time
from collections import Counter
from dataclasses import dataclass, field

from .engine_client import EngineClient
from .options import ServerOptions
from .page import Feed
from .served_model import ServedModel


@dataclass
class ServerState:
    """The state that all requests share: `request.app.state.server`."""

    options: ServerOptions
    engine: EngineClient
    model: ServedModel
    kernels: str  # a description of the engine's kernels
    start_time: float = field(default_factory=time.time)
    is_stopping: bool = False  # new requests are refused
    rejections: Counter[str] = field(default_factory=Counter)  # number of requests refused since the start, by limit
    ignored_fields: set[str] = field(default_factory=set)  # names of unknown fields that have been logged
    feed: Feed = field(init=False)  # the page's events

    def __post_init__(self) -> None:
        """Connect the feed to the engine."""
        self.feed = Feed(lambda is_on: self.engine.watch(is_on, self.options.show_text))
        self.engine.on_events = self.feed.add_events

    @property
    def is_stuck(self) -> bool:
        """True if the engine has work but has made no progress for more than watchdog_timeout seconds."""
        return self.engine.stalled_seconds > self.options.watchdog_timeout
