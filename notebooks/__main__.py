"""python -m notebooks: execute all notebooks in place, and store their outputs, if the machine does nothing else.

python -m notebooks s1           only notebooks whose names begin with s1

Their code is folded: Jupyter Lab shows prose and pictures, and opens a cell when you click it.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from tqdm import tqdm

from stages.bench.steady import BusyMachineError, Quiet

FOLDER = Path(__file__).parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
FOLDED = {"jupyter": {"source_hidden": True}}  # Jupyter Lab hides the source, and shows the outputs


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m notebooks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="the beginning of a name (default: all notebooks)")
    args = parser.parse_args(argv)
    paths = [path for path in sorted(FOLDER.glob("*.ipynb")) if path.name.startswith(tuple(args.names) or "")]
    if not paths:
        print(f"no notebook begins with {' or '.join(args.names)}", file=sys.stderr)
        return 2
    return max(execute_in_place(path, Quiet()) for path in paths)


def execute_in_place(path: Path, quiet: Quiet) -> int:
    """Run a notebook, write it back with its outputs, and return 0. If it fails, leave it unchanged and return 1."""
    notebook = nbformat.read(path, as_version=4)
    start = time.perf_counter()
    try:
        quiet.measure(path.name, partial(execute, notebook, cwd=path.parent, name=path.name))
    except (BusyMachineError, CellExecutionError) as error:
        print(f"{path.name}: {error}", file=sys.stderr)
        return 1
    nbformat.write(notebook, path)
    print(f"{path.name}  {time.perf_counter() - start:.0f} s  {path.stat().st_size / 1024:.0f} KB")
    return 0


def execute(notebook: nbformat.NotebookNode, cwd: Path, name: str = "") -> None:
    """Run all cells in `cwd` and store their outputs. Raise CellExecutionError if one fails."""
    client = NotebookClient(
        notebook,
        timeout=300,  # seconds per cell
        record_timing=False,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(cwd)}},
    )
    with tqdm(total=len(notebook.cells), desc=name, unit="cell", leave=False, disable=None) as bar:

        def progress(cell: Any, cell_index: int) -> None:
            bar.update(cell_index + 1 - bar.n)

        client.on_cell_complete = progress
        client.execute()
    strip_metadata(notebook)


def strip_metadata(notebook: nbformat.NotebookNode) -> None:
    """Remove all traces of the machine and the run, and fold the code. Then the next run's diff is its results."""
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict(FOLDED if cell.cell_type == "code" else {})
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})


if __name__ == "__main__":
    sys.exit(main())
