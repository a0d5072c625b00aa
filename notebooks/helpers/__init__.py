"""Helpers of the notebooks. They drive the engines and draw the results; they define no engine logic.

s1 to s7 each belong to one notebook, nanovllm and gpu to the package's, beyond and routing to those of their names, and
claims/ to claims.ipynb. All of them draw with pictures. timing times short calls.
"""

import os


def size(full: int, quick: int) -> int:
    """Return `full`, or `quick` if NOTEBOOKS_QUICK is set. Committed outputs are of `full`."""
    return quick if os.environ.get("NOTEBOOKS_QUICK") else full
