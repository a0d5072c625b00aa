"""The stages of nanovllm, and the tools that check and build the chain of stages."""

import os
import signal
import sys
from types import FrameType


def end_imports(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C: end the process in one line while a module is imported, raise KeyboardInterrupt at other times.

    torch loses a KeyboardInterrupt that is raised while it imports numpy, and goes on.
    """
    caller = frame
    while caller:
        if "importlib" in caller.f_code.co_filename:
            os.write(2, b"interrupted\n")
            os._exit(130)  # a shell's exit status for a command that SIGINT has ended
        caller = caller.f_back
    signal.default_int_handler(number, frame)


if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end_imports)  # "-m" is there while Python looks for the module: `python -m stages...`
