"""python -m notebooks.lab 3 [JUPYTER LAB FLAGS]: open a copy of a notebook, so the committed one stays unchanged.

The copy is notebooks/mine/s3_paged_attention.ipynb. It has no outputs below the first prediction: run the cells to see
whether you were right. If it exists, it opens as you left it.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def main(argv: list[str], folder: Path = FOLDER) -> int:
    """Copy and open the notebook that argv[0] names, such as 3, s3 or claims. Return 2 if there is none."""
    name, *flags = argv or [""]
    notebook = pick(name, folder)
    if notebook is None:
        names = ", ".join(path.stem for path in sorted(folder.glob("*.ipynb")))
        print(f"there is no notebook {name!r}; there are: {names}", file=sys.stderr)
        return 2
    print(copy_of(notebook, folder / "mine"), flush=True)
    command = [sys.executable, "-m", "jupyter", "lab", str(folder / "mine" / notebook.name), *flags]
    os.execv(sys.executable, command)  # so Ctrl-C goes to Jupyter


def pick(name: str, folder: Path) -> Path | None:
    """Return the notebook of a stage, by its number or key, or any notebook by its name."""
    beginning = f"s{name}_" if name.isdigit() else f"{name}_"
    paths = sorted(folder.glob("*.ipynb"))
    return next((path for path in paths if path.stem == name or path.name.startswith(beginning)), None)


def copy_of(notebook: Path, target: Path) -> str:
    """Copy `notebook` without its answers into the folder `target` unless a copy exists. Say in a line which."""
    mine = target / notebook.name
    if mine.exists():
        return f"{mine} is as you left it (delete it to start over)"
    target.mkdir(exist_ok=True)
    copy = without_answers(json.loads(notebook.read_text(encoding="utf-8")))
    mine.write_text(json.dumps(copy, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return f"{mine} is yours, and the committed one stays unchanged"


def without_answers(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return the notebook without the outputs of the code cells below its first prediction."""
    cells, asked = [], False
    for cell in notebook["cells"]:
        asked = asked or "**Predict:**" in "".join(cell["source"])
        is_answer = asked and cell["cell_type"] == "code"
        cells.append(cell | {"outputs": [], "execution_count": None} if is_answer else cell)
    return notebook | {"cells": cells}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
