"""What the notebooks are made with: s1 to s7 belong to one notebook each; nanovllm, ways, roofline, timelines, apart,
taking, paged and launches to that of the product; the other modules to several.

They drive the stages' own parts and draw what these report; they define no engine logic.
"""

import os


def size(full: int, quick: int) -> int:
    """How much a cell does: `full`, or `quick` where NOTEBOOKS_QUICK is set. Committed outputs are of `full`."""
    return quick if os.environ.get("NOTEBOOKS_QUICK") else full
