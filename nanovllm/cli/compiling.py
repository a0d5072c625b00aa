"""Kernels that are still being compiled: when a command ends, and before something is measured."""

from contextlib import suppress
from typing import Any

from ..llm import LLM
from ..log import tell
from .interrupts import ctrl_c_raises

SECONDS = 120


def finish_compiling(llm: LLM) -> None:
    """Wait for a compiler that this command has started: without its work the next run would start it again."""
    if llm.llm_engine.kernels.is_compiling:
        tell("compiling kernels for the next runs, once on this machine: about half a minute, or Ctrl-C")
        with suppress(KeyboardInterrupt), ctrl_c_raises():
            llm.llm_engine.kernels.wait(SECONDS)


def compiled_llm(engine: dict[str, Any]) -> LLM:
    """An LLM whose kernels, if it is to use them, are there before the first request."""
    llm = LLM(**engine)
    if llm.llm_engine.kernels.is_compiling:
        tell("compiling kernels, once on this machine: about half a minute")
        llm.llm_engine.kernels.wait(SECONDS)
    llm.llm_engine.kernels.take_up()
    return llm
