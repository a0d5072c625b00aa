"""vLLM's package `vllm.v1.metrics`."""

from ...missing_names import import_or_raise

__getattr__ = import_or_raise(__name__)
