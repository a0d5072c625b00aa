"""python -m notebooks: execute all notebooks in place, so that their outputs are this code's.

python -m notebooks s1           only those whose name begins so
python -m notebooks --readme     write notebooks/pool.svg, the picture at the top of README.md
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from tqdm import tqdm

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m notebooks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="beginnings of names; default: all notebooks")
    parser.add_argument("--readme", action="store_true", help="write pool.svg instead")
    args = parser.parse_args(argv)
    if args.readme:
        return write_readme_picture(FOLDER / "pool.svg")
    paths = [path for path in sorted(FOLDER.glob("*.ipynb")) if path.name.startswith(tuple(args.names) or "")]
    if not paths:
        print(f"no notebook begins with {' or '.join(args.names)}", file=sys.stderr)
        return 2
    return max(execute_in_place(path) for path in paths)


def execute_in_place(path: Path) -> int:
    """Run a notebook and write it back with its outputs; a notebook that fails stays as it was. Returns 0 or 1."""
    notebook = nbformat.read(path, as_version=4)
    start = time.perf_counter()
    try:
        execute(notebook, cwd=path.parent, name=path.name)
    except CellExecutionError as error:
        print(f"{path.name}: {error}", file=sys.stderr)
        return 1
    nbformat.write(notebook, path)
    print(f"{path.name}  {time.perf_counter() - start:.0f} s  {path.stat().st_size / 1024:.0f} KB")
    return 0


def execute(notebook: nbformat.NotebookNode, cwd: Path, name: str = "") -> None:
    """Run all cells in `cwd`; outputs and nothing else change. Raises CellExecutionError."""
    client = NotebookClient(
        notebook,
        timeout=120,
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
    """Leave nothing that says which machine or which run: the next run's diff is its results."""
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})


def write_readme_picture(path: Path) -> int:
    """The pool of each stage when eight stories are at their longest: real runs, one row a stage."""
    from notebooks.helpers import pictures
    from notebooks.helpers.s1 import pool_rows
    from notebooks.helpers.s2 import as_pieces
    from stages import s1_contiguous_cache as s1
    from stages import s2_block_manager as s2
    from stages.s1_contiguous_cache.__main__ import PROMPTS

    pools = {}
    for stage in (s1, s2):
        llm = stage.LLM(ROOT / "models" / "storyteller", dtype="float32", max_model_len=1024, kv_cache_tokens=8192)
        prompts = (2 * PROMPTS)[:8]
        llm.generate(prompts, stage.SamplingParams(temperature=0.7, max_tokens=120, ignore_eos=True))
        pools[stage] = llm.peak
    pieces, blocks = pools[s1], pools[s2]
    fit = 8 * blocks.num_slots // blocks.promised
    one = f"stage 1, a contiguous cache: eight stories hold {pieces.held:,} slots and use {pieces.used:,}"
    two = f"stage 2, blocks of 16: they hold {blocks.held:,} and use {blocks.used:,}; there is room for {fit} like them"
    empty = [f"{pool.wasted / pool.held:.0%}" for pool in (pieces, blocks)]
    finding = f"{empty[0]} of what is held in one piece is empty, in blocks {empty[1]}"
    rows = [(one, pieces), (two, as_pieces(blocks))]
    pictures.style()
    path.write_text(pictures.svg(pool_rows(rows, finding)), encoding="utf-8")
    print(f"{path.name}  {path.stat().st_size / 1024:.0f} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
