"""The bits of GGUF types in a file and in memory: a table in docs/checkpoints.md.

python -m nanovllm.tests.gguf_types     write the table into the page
"""

import re
from pathlib import Path

import numpy as np

from ..checkpoints.gguf import EXACT_TYPES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "checkpoints.md"
BLOCK = re.compile(r"(?<=<!-- figures: gguf_types -->\n).*?(?=<!-- /figures -->)", re.DOTALL)


def types_table() -> str:
    """Return a table of the bits of a weight, with scales and minima."""
    lines = ["| type | bits in the file | bits in memory |", "|---|---|---|"]
    for name, (format, block_bytes, unpack_blocks) in sorted(EXACT_TYPES.items()):
        size = unpack_blocks(np.zeros((1, block_bytes), np.uint8))[0].size
        lines.append(f"| {name} | {8 * block_bytes / size:.4g} | {format.lines / format.groups:.4g} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(lambda _: types_table(), PAGE.read_text("utf-8")), encoding="utf-8")
