"""vLLM's module `vllm.engine.async_llm_engine`. The engine doesn't import AsyncLLM, so a script's first use does."""

from typing import TYPE_CHECKING

from ..missing_names import import_or_raise

if TYPE_CHECKING:
    from ..async_llm import AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
__getattr__ = import_or_raise(__name__, {"AsyncLLMEngine": "..async_llm"})
