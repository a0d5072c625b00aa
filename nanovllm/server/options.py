"""ServerOptions: what the command line says of the server, beside the engine's knobs and the model."""

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
