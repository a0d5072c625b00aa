"""ServerOptions: what the command line says of the server, beside the engine's knobs and the model."""

import math
from dataclasses import dataclass

from ..core.flags import knob


@dataclass(frozen=True)
class ServerOptions:
    """The knobs. cli/knobs.py repeats them for --help."""

    host: str = knob("127.0.0.1", "the address to listen at; 0.0.0.0: all of this machine's")
    port: int = knob(8000, "the port; 0: a free one, which the line that says where it listens names")
    chat_template: str | None = knob(None, "a file with the template of chats, or the word plain")
    show_text: bool = knob(False, "show prompts and answers on the page to whoever opens it, not only their blocks")
    shutdown_timeout: float = knob(30.0, "seconds that running requests have to end after SIGTERM")

    def __post_init__(self) -> None:
        """Raises ValueError for a value that cannot be."""
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, not {self.port}")
        if not 0 <= self.shutdown_timeout < math.inf:
            raise ValueError(f"shutdown_timeout must be a number of seconds, 0 or above, not {self.shutdown_timeout}")
