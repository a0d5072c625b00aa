"""python -m notebooks.lab 3 [FLAGS OF JUPYTER LAB]: open a copy of a notebook, so that the committed one stays.

The copy is notebooks/mine/s3_paged_attention.ipynb. If it is there already it is opened as you left it.
"""

import os
import shutil
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def main(argv: list[str], folder: Path = FOLDER) -> int:
    """Copy and open the notebook that argv[0] names: 3, s3 or claims. Returns 2, after one line, if there is none."""
    name, *flags = argv or [""]
    found = pick(name, folder)
    if found is None:
        names = ", ".join(path.stem for path in sorted(folder.glob("*.ipynb")))
        print(f"there is no notebook {name!r}; there are: {names}", file=sys.stderr)
        return 2
    print(copy_of(found, folder / "mine"), flush=True)
    command = [sys.executable, "-m", "jupyter", "lab", str(folder / "mine" / found.name), *flags]
    os.execv(sys.executable, command)  # Ctrl-C is jupyter's


def pick(name: str, folder: Path) -> Path | None:
    """The notebook of a stage, by its number or key, or any by its name."""
    beginning = f"s{name}_" if name.isdigit() else f"{name}_"
    paths = sorted(folder.glob("*.ipynb"))
    return next((path for path in paths if path.stem == name or path.name.startswith(beginning)), None)


def copy_of(notebook: Path, target: Path) -> str:
    """Copy `notebook` into the folder `target` unless a copy is there; returns what was done, in a line."""
    mine = target / notebook.name
    if mine.exists():
        return f"{mine} is as you left it (delete it to begin anew)"
    target.mkdir(exist_ok=True)
    shutil.copyfile(notebook, mine)
    return f"{mine} is yours: the committed one stays as it is"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
