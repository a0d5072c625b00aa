"""vLLM's module `vllm.v1.metrics.reader`."""

from ...engine.stats import Counter, Gauge, Histogram, Metric, Vector
from ...missing_names import import_or_raise

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
__getattr__ = import_or_raise(__name__)
