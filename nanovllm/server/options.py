"""ServerOptions: what the command line says of the server, beside the engine's knobs and the model."""

from dataclasses import dataclass

from ..core.flags import knob
from .origins import read_origins


@dataclass(frozen=True)
class ServerOptions:
    """The knobs. cli/knobs.py repeats them for --help."""

    host: str = knob("127.0.0.1", "the address to listen at; 0.0.0.0: all of this machine's")
    port: int = knob(8000, "the port; 0: a free one, which the line that says where it listens names")
    chat_template: str | None = knob(None, "a file with the template of chats, or the word plain")
    shutdown_timeout: float = knob(30.0, "seconds that running requests have to end after SIGTERM")
    allowed_origins: str | None = knob(None, "servers whose pages may ask, with commas or as a JSON list; *: all")
    max_num_queued_reqs: int | None = knob(None, "most samples that run or wait; more are answered 429")
    max_num_queued_tokens: int | None = knob(None, "most tokens of prompts that wait for their first token, likewise")
    max_request_tokens: int | None = knob(1 << 20, "most tokens that a request may come to, all prompts and samples")
    max_body_bytes: int = knob(1 << 22, "most bytes of a request's body")
    header_timeout: float = knob(10.0, "seconds in which a request's head must come")
    body_timeout: float = knob(60.0, "seconds in which its body must come")
    api_keys: tuple[str, ...] = ()  # no knob: it may be given several times, or in the environment

    def __post_init__(self) -> None:
        """Raises ValueError for a limit that can be no limit."""
        for name in ("max_num_queued_reqs", "max_num_queued_tokens", "shutdown_timeout"):
            check_least(name, getattr(self, name), 0)
        for name in ("max_request_tokens", "max_body_bytes", "header_timeout", "body_timeout"):
            check_least(name, getattr(self, name), 0, is_open=True)
        if any(not key for key in self.api_keys):
            raise ValueError("an API key is empty: anybody has that one")
        read_origins(self.allowed_origins)


def check_least(name: str, value: float | None, least: float, is_open: bool = False) -> None:
    """`is_open`: it must be more than `least`."""
    if value is not None and not (value > least or (value == least and not is_open)):
        raise ValueError(f"{name} must be {'more than' if is_open else 'at least'} {least}, not {value}")
