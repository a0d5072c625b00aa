"""vLLM's module `vllm.engine.arg_utils`."""

from ..missing_names import import_or_raise
from .config import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
__getattr__ = import_or_raise(__name__)
