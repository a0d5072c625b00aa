"""The sockets that the server listens at, and how they are called."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from .options import ServerOptions


@contextmanager
def listening_sockets(options: ServerOptions) -> Iterator[list[socket.socket]]:
    """For clients, and for the page if it has an address of its own."""
    addresses = [(options.host, options.port), options.page_address]
    with ExitStack() as stack:
        yield [stack.enter_context(listening_socket(*address)) for address in addresses if address]


def listening_socket(host: str, port: int) -> socket.socket:
    """It takes its address now, and listens later. Raises OSError if the address cannot be had."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise OSError(f"cannot listen at {host}, port {port}: {error.strerror or error}") from None
    return listener


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
