"""The bits of GGUF types in a file and in memory: a table in nanovllm/docs/checkpoints.md."""

from typing import Any

import numpy as np

from stages.tools.prose.markdown import table


def types_block(results: dict[str, Any]) -> str:
    """Return a table of the bits of a weight, with scales and minima."""
    from nanovllm.checkpoints.gguf import EXACT_TYPES

    rows = []
    for name, (format, block_bytes, unpack_blocks) in sorted(EXACT_TYPES.items()):
        size = unpack_blocks(np.zeros((1, block_bytes), np.uint8))[0].size
        rows.append([name, f"{8 * block_bytes / size:.4g}", f"{format.lines / format.groups:.4g}"])
    return table(["type", "bits in the file", "bits in memory"], rows)


BLOCKS = {"gguf_types": types_block}
