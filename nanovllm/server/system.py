"""What the front asks of the operating system and of the interpreter, to serve many at a time."""

import asyncio
import gc
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..log import tell

SWITCH = 0.001  # seconds that the event loop waits for the lock of a thread that reads a large body
QUIET = 10.0  # seconds between two lines about clients that cannot come in

Handler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]


def prepare(loop: asyncio.AbstractEventLoop) -> None:
    """Let this process have many clients, of which none waits long for what is done for another."""
    gc.freeze()  # what is here now stays: a collection that looks at all of it takes a tenth of a second
    sys.setswitchinterval(SWITCH)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # each client is an open file; some systems name a limit and grant less
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    loop.set_exception_handler(loop_errors())


def loop_errors() -> Handler:
    """asyncio tells thousands of times a second that there is no file for one client more: a line is enough."""
    last = -QUIET

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last
        if "_start_serving()" in context["message"]:
            return  # the server has ended while asyncio waited to try again
        if "accept() out of system resource" not in context["message"]:
            loop.default_exception_handler(context)
        elif time.monotonic() - last >= QUIET:
            last = time.monotonic()
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            tell(f"error: clients wait: this process may have {most} open files (ulimit -n), and has them")

    return handle
