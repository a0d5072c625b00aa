"""vLLM's module `vllm.utils.network_utils`."""

import socket

from ..missing_names import import_or_raise


def get_open_port() -> int:
    """Return a port of this machine that no program uses."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port


__all__ = ["get_open_port"]
__getattr__ = import_or_raise(__name__)
