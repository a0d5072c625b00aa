"""vLLM's module `vllm.outputs`."""

from .engine.outputs import CompletionOutput, EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from .missing_names import import_or_raise

__all__ = ["CompletionOutput", "EmbeddingOutput", "EmbeddingRequestOutput", "RequestOutput"]
__getattr__ = import_or_raise(__name__)
