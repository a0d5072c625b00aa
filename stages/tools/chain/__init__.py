"""The chain of stages: what chain.toml declares, checked, shown as diffs, and merged forward. Standard library and git.

Start reading in model.py; load.py reads chain.toml into it.
"""

from .lines import added_lines
from .load import load
from .model import Chain, ChainError, Change, FunctionName, Package, Stage, Step

__all__ = ["Chain", "ChainError", "Change", "FunctionName", "Package", "Stage", "Step", "added_lines", "load"]
