"""ServerOptions: what the command line says of the server, beside the engine's options and the model.

page_host and page_port are to the page as host and port are to the rest: whoever knows the one pair knows the other.
The port alone is enough. The page's host is then this machine, also where clients may come from others.
"""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ServerOptions:
    """The options of `nanovllm serve`."""

    host: str = field(
        default="127.0.0.1", metadata={"help": "the address to listen at; 0.0.0.0: all of this machine's"}
    )
    port: int = field(
        default=8000, metadata={"help": "the port; 0: a free one, which the line that says where it listens names"}
    )
    page_port: int | None = field(
        default=None, metadata={"help": "a port of its own for the page and /metrics; without it they are at the first"}
    )
    page_host: str | None = field(default=None, metadata={"help": "the address of that port; without it 127.0.0.1"})
    chat_template: str | None = field(
        default=None, metadata={"help": "a file with the template of chats, or the word plain"}
    )
    show_text: bool = field(
        default=False,
        metadata={"help": "show prompts and answers on the page to whoever opens it, not only their blocks"},
    )
    shutdown_timeout: float = field(
        default=30.0, metadata={"help": "seconds that running requests have to end after SIGTERM"}
    )
    allowed_origins: str | None = field(
        default=None, metadata={"help": "servers whose pages may ask, with commas or as a JSON list; *: all"}
    )
    max_num_queued_reqs: int | None = field(
        default=None, metadata={"help": "most samples that run or wait; more are answered 429"}
    )
    max_num_queued_tokens: int | None = field(
        default=None, metadata={"help": "most tokens of prompts that wait for their first token, likewise"}
    )
    max_logprobs: int = field(
        default=20,
        metadata={"help": "most log-probabilities that are told of a token; -1: as many as there are tokens"},
    )
    max_request_tokens: int | None = field(
        default=1 << 20, metadata={"help": "most tokens that a request may come to, all prompts and samples"}
    )
    max_body_bytes: int = field(default=1 << 22, metadata={"help": "most bytes of a request's body"})
    header_timeout: float = field(default=10.0, metadata={"help": "seconds in which a request's head must come"})
    body_timeout: float = field(
        default=60.0, metadata={"help": "seconds in which its body must come, and an answer finds its reader"}
    )
    api_keys: tuple[str, ...] = ()  # no option of its own: it may be given several times, or in the environment

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
