"""Marks in prose, and the numbers and tables that belong there.

No measured number is typed by hand. Prose holds three kinds of marks, which a code host does not show:

    <!-- n: predict.s1.cache_at_16:.1f -->4.2<!-- / -->     one number: a path into results.json, and its format
    <!-- figures: stages --> ... <!-- /figures -->          a block: tables.py, ideas.py, model_card.py
    <!-- said -->833,000 a second<!-- / -->                 somebody else's figure, as they give it

Cells of notebooks hold the first and the last kind. A key is shown in one form everywhere. peers.py
draws a picture of the same results. results.json is written by `python -m stages.bench`.
"""

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import safe_open

from stages.tools.chain import added_lines, load
from stages.tools.prose import ideas, model_card, peers, tables
from stages.tools.prose.markdown import look_up

ROOT = Path(__file__).resolve().parents[3]
RESULTS = Path("stages/bench/results.json")
BLOCKS = tables.BLOCKS | ideas.BLOCKS | model_card.BLOCKS
NUMBER = re.compile(r"(<!-- n: ([\w.]+)(?::([^ ]+))? -->).*?(<!-- / -->)", re.DOTALL)
IN_A_CELL = re.compile(r"(<!-- n: ([\w.]+)(?::([^ ]+))? -->)[^\n\"]*?(<!-- / -->)")
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- /figures -->)", re.DOTALL)


def stale(root: Path = ROOT) -> list[str]:
    """Return the prose files and pictures, relative to `root`, whose numbers differ from results.json."""
    return [str(path.relative_to(root)) for path in prose_files(root) if render(path, root) != path.read_text("utf-8")]


def write(root: Path = ROOT) -> list[str]:
    """Update the numbers of all prose files, and return the files that changed."""
    changed = stale(root)
    for name in changed:
        (root / name).write_text(render(root / name, root), encoding="utf-8")
    return changed


def prose_files(root: Path) -> list[Path]:
    """Return the picture, the notebooks, and every page of prose except DIFF.md, which stages/chain.py writes."""
    stages = sorted((root / "stages").glob("s[0-9]*"))
    folders = [root, root / "stages", *stages, root / "nanovllm", root / "models" / "storyteller", root / "notebooks"]
    pages = [path for folder in folders for path in sorted(folder.glob("*.md")) if path.name != "DIFF.md"]
    return pages + sorted((root / "notebooks").glob("*.ipynb")) + sorted((root / "notebooks").glob(peers.PICTURE))


def render(path: Path, root: Path) -> str:
    """Return the text of a file with its numbers filled in. Raise ValueError for a mark with an unknown key.

    A notebook's text is JSON. A mark in a cell is on one line and has nothing that JSON would escape, so it is filled
    in where it stands, and nothing else of the file changes.
    """
    results = known(root)
    if path.name == peers.PICTURE:
        return peers.picture(results)

    def number(match: re.Match[str]) -> str:
        start, key, spec, end = match.groups()
        return start + format(number_of(results, key, path), spec or "") + end

    def block(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        if name not in BLOCKS:
            raise ValueError(f"{path}: no function makes the block {name!r}")
        return start + BLOCKS[name](results) + end

    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        return IN_A_CELL.sub(number, text)
    return BLOCK.sub(block, NUMBER.sub(number, text))


def known(root: Path) -> dict[str, Any]:
    """Return all that a mark can name: measured results, and "facts" counted here."""
    results: dict[str, Any] = read(root / RESULTS)
    return results | {"facts": facts(root)}


def number_of(results: dict[str, Any], key: str, path: Path) -> Any:
    try:
        return look_up(results, key)
    except KeyError:
        raise ValueError(f"{path}: {RESULTS} has no {key}") from None


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@cache
def facts(root: Path) -> dict[str, float]:
    """Return the numbers that are counted, not measured: they are always current."""
    model = read(root / "models/storyteller/config.json")
    heads_and_sizes = model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"]
    bytes_per_token = 2 * heads_and_sizes * 4  # a key and a value, float32
    with safe_open(root / "models/storyteller/model.safetensors", framework="pt") as file:
        num_parameters = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return {
        "bytes_per_token": bytes_per_token,
        "weights_in_texts": 4 * num_parameters / (bytes_per_token * model["max_position_embeddings"]),
        **{f"{stage.key}_lines": added_lines(stage) for stage in load(root).stages},
        **{f"{stage.key}_minutes": stage.minutes for stage in load(root).stages if stage.steps},  # of its exercise
        "million_parameters": num_parameters / 1e6,
    }
