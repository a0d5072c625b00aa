"""ServerOptions: what the command line says of the server, beside the engine's knobs and the model.

page_host and page_port are to the page as host and port are to the rest: whoever knows the one pair knows the other.
The port alone is enough. The page's host is then this machine, also where clients may come from others.
"""

import math
from dataclasses import dataclass

from ..engine.checks import knob


@dataclass(frozen=True)
class ServerOptions:
    """The options of `nanovllm serve`."""

    host: str = knob("127.0.0.1", "the address to listen at; 0.0.0.0: all of this machine's")
    port: int = knob(8000, "the port; 0: a free one, which the line that says where it listens names")
    page_port: int | None = knob(None, "a port of its own for the page and /metrics; without it they are at the first")
    page_host: str | None = knob(None, "the address of that port; without it 127.0.0.1")
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
    body_timeout: float = knob(60.0, "seconds in which its body must come, and an answer finds its reader")
    api_keys: tuple[str, ...] = ()  # no knob: it may be given several times, or in the environment

    def __post_init__(self) -> None:
        """Raises ValueError for a value that cannot be."""
        from .origins import read_origins  # starlette comes with it, for which --help need not wait

        for name in ("port", "page_port"):
            check_port(name, getattr(self, name))
        if self.page_host is not None and self.page_port is None:
            raise ValueError(f"page_host is {self.page_host}, and page_port is missing: give both")
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

    @property
    def page_address(self) -> tuple[str, int] | None:
        """Host and port. None: the page is at the first address."""
        return None if self.page_port is None else (self.page_host or "127.0.0.1", self.page_port)


def check_port(name: str, port: int | None) -> None:
    """`port` is None, or the number of one; 0 stands for a free one."""
    if port is not None and not 0 <= port <= 65535:
        raise ValueError(f"{name} must be from 0 to 65535, not {port}")


def check_between(name: str, value: float | None, least: float) -> None:
    """`value` is None, or a number of at least `least` that is no infinity."""
    if value is not None and not least <= value < math.inf:
        unit = "a number of seconds, " if isinstance(value, float) else ""
        raise ValueError(f"{name} must be {unit}{least:g} or above, not {value}")
