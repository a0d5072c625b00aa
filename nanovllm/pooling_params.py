"""vLLM's module `vllm.pooling_params`."""

from .engine.pooling_params import PoolingParams
from .missing_names import import_or_raise

__all__ = ["PoolingParams"]
__getattr__ = import_or_raise(__name__)
