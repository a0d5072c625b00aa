"""ServerOptions: what the command line says of the server, beside the engine's knobs and the model."""

import math
from dataclasses import dataclass

from ..core.flags import knob
from .origins import read_origins


@dataclass(frozen=True)
class ServerOptions:
    """The knobs. cli/knobs.py repeats them for --help."""

    host: str = knob("127.0.0.1", "the address to listen at; 0.0.0.0: all of this machine's")
    port: int = knob(8000, "the port; 0: a free one, which the line that says where it listens names")
    chat_template: str | None = knob(None, "a file with the template of chats, or the word plain")
    show_text: bool = knob(False, "show prompts and answers on the page to whoever opens it, not only their blocks")
    shutdown_timeout: float = knob(30.0, "seconds that running requests have to end after SIGTERM")
    allowed_origins: str | None = knob(None, "servers whose pages may ask, with commas or as a JSON list; *: all")
    max_num_queued_reqs: int | None = knob(None, "most samples that run or wait; more are answered 429")
    max_num_queued_tokens: int | None = knob(None, "most tokens of prompts that wait for their first token, likewise")
    max_logprobs: int = knob(20, "most log-probabilities that are told of a token; -1: as many as there are tokens")
    max_request_tokens: int | None = knob(1 << 20, "most tokens that a request may come to, all prompts and samples")
    max_body_bytes: int = knob(1 << 22, "most bytes of a request's body")
    header_timeout: float = knob(10.0, "seconds in which a request's head must come")
    body_timeout: float = knob(60.0, "seconds in which its body must come")
    api_keys: tuple[str, ...] = ()  # no knob: it may be given several times, or in the environment

    def __post_init__(self) -> None:
        """Raises ValueError for a value that cannot be."""
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, not {self.port}")
        for name in ("shutdown_timeout", "header_timeout", "body_timeout"):
            check_between(name, getattr(self, name), 0.0)
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            check_between(name, getattr(self, name), 0)
        for name in ("max_request_tokens", "max_body_bytes"):
            check_between(name, getattr(self, name), 1)
        check_between("max_logprobs", self.max_logprobs, -1)
        if any(not key for key in self.api_keys):
            raise ValueError("an API key is empty: anybody has that one")
        read_origins(self.allowed_origins)


def check_between(name: str, value: float | None, least: float) -> None:
    """`value` is None, or a number of at least `least` that is no infinity."""
    if value is not None and not least <= value < math.inf:
        unit = "a number of seconds, " if isinstance(value, float) else ""
        raise ValueError(f"{name} must be {unit}{least:g} or above, not {value}")
