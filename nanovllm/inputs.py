"""vLLM's module `vllm.inputs`."""

from .engine.prompts import PromptType, TextPrompt, TokensPrompt
from .missing_names import import_or_raise

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
__getattr__ = import_or_raise(__name__)
