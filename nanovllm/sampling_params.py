"""vLLM's module `vllm.sampling_params`."""

from .engine.beam_search import BeamSearchParams
from .engine.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from .missing_names import import_or_raise

__all__ = [
    "BeamSearchParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
__getattr__ = import_or_raise(__name__)
