"""vLLM's package `vllm.utils`: helpers that scripts import. The engine itself uses none of them."""

from ..missing_names import import_or_raise
from .argparse_utils import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
__getattr__ = import_or_raise(__name__)
