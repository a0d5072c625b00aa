"""ServerOptions: the options of the server alone. `nanovllm serve` adds the engine's.

The page has the server's address, unless page_port is set. page_host is then this machine by default, even if clients
connect from other machines.
"""

import json
import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ServerOptions:
    """The options of `nanovllm serve`."""

    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on; 0.0.0.0 for all of this machine's"})
    port: int = field(default=8000, metadata={"help": "port; 0 picks a free one, shown in the first line of output"})
    page_port: int | None = field(
        default=None, metadata={"help": "separate port for the page and /metrics; default: the same port"}
    )
    page_host: str | None = field(default=None, metadata={"help": "address of that port; default: 127.0.0.1"})
    chat_template: str | None = field(
        default=None, metadata={"help": "file with a chat template, or the word plain; default: the model's own"}
    )
    show_text: bool = field(
        default=False, metadata={"help": "show prompts and outputs, not only blocks, to everyone who opens the page"}
    )
    shutdown_timeout: float = field(
        default=30.0, metadata={"help": "seconds that running requests have to finish after SIGTERM"}
    )
    allowed_origins: str | None = field(
        default=None,
        metadata={"help": "sites whose pages may send requests, separated by commas or as a JSON list; * allows all"},
    )
    max_num_queued_reqs: int | None = field(
        default=None, metadata={"help": "most samples that run or wait; further requests get status 429"}
    )
    max_num_queued_tokens: int | None = field(
        default=None, metadata={"help": "most prompt tokens that wait for a first token; further requests get 429"}
    )
    max_logprobs: int = field(
        default=20, metadata={"help": "most log-probabilities per token that a request may ask for; -1 for no limit"}
    )
    max_request_tokens: int | None = field(
        default=1 << 20, metadata={"help": "most tokens of one request, over all its prompts and samples"}
    )
    max_body_bytes: int = field(default=1 << 22, metadata={"help": "most bytes of a request's body"})
    header_timeout: float = field(default=10.0, metadata={"help": "seconds in which a request's head must arrive"})
    body_timeout: float = field(
        default=60.0, metadata={"help": "seconds in which its body must arrive, and in which a client must read"}
    )
    api_keys: tuple[str, ...] = ()  # --api-key may be repeated, and has an environment variable

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid value."""
        for name in ("port", "page_port"):
            check_port(name, getattr(self, name))
        if self.page_host is not None and self.page_port is None:
            raise ValueError(f"page_host is {self.page_host}, but page_port is missing: set both")
        for name in ("shutdown_timeout", "header_timeout", "body_timeout"):
            check_at_least(name, getattr(self, name), 0.0)
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            check_at_least(name, getattr(self, name), 0)
        for name in ("max_request_tokens", "max_body_bytes"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("max_logprobs", self.max_logprobs, -1)
        if any(not key for key in self.api_keys):
            raise ValueError("api_keys must not contain an empty key")
        read_origins(self.allowed_origins)

    @property
    def page_address(self) -> tuple[str, int] | None:
        """Host and port of the page. None if it has the server's."""
        return None if self.page_port is None else (self.page_host or "127.0.0.1", self.page_port)


def check_port(name: str, port: int | None) -> None:
    """Raise ValueError for an invalid port. 0 picks a free one."""
    if port is not None and not 0 <= port <= 65535:
        raise ValueError(f"{name} must be from 0 to 65535, got {port}")


def check_at_least(name: str, value: float | None, least: float) -> None:
    """Raise ValueError unless `value` is None, or a finite number of at least `least`."""
    if value is not None and not least <= value < math.inf:
        raise ValueError(f"{name} must be a finite number, at least {least:g}, got {value}")


def read_origins(given: str | None) -> list[str]:
    """Return the origins in a JSON list, as in vLLM, or in a comma-separated list. Raise ValueError for invalid JSON.

    >>> read_origins("http://a, http://b"), read_origins('["*"]'), read_origins(None)
    (['http://a', 'http://b'], ['*'], [])
    """
    if given is None or not given.startswith("["):
        return [each.strip() for each in (given or "").split(",") if each.strip()]
    try:
        origins = json.loads(given)
    except json.JSONDecodeError:
        origins = None
    if not isinstance(origins, list) or not all(isinstance(each, str) for each in origins):
        raise ValueError(f"allowed_origins must be a list of strings, got {given}")
    return origins
