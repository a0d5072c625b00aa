"""vLLM's module `vllm.v1.engine.async_llm`."""

from ...async_llm import AsyncLLM
from ...missing_names import import_or_raise

__all__ = ["AsyncLLM"]
__getattr__ = import_or_raise(__name__)
