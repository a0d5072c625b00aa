"""Measured numbers and tables in prose. None is typed by hand.

A generated block stands between two comments, which a code host does not show, and is replaced as a whole:

    <!-- figures: stages --> ... <!-- /figures -->      tables.py, ideas.py, model_card.py, two_ranks.py

A number inside a sentence has no mark. numbers.toml lists, for each file, pieces of its sentences with a place for the
number: "puts {serving.s4.tokens:,} tokens through". A place is a path into results.json and a format of figures.py,
which also writes the range of a timed number. Each piece occurs exactly once in its file. A notebook has them in
Markdown cells, each on one line: "The lesson's number: ...". `python -m stages.bench` writes results.json, and peers.py
has a report of its own.
"""

import json
import math
import re
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

from safetensors import safe_open

from stages.tools.chain import added_lines, load
from stages.tools.prose import ideas, model_card, peers, tables, two_ranks
from stages.tools.prose.figures import SAME, parts_of, shown

ROOT = Path(__file__).resolve().parents[3]
RESULTS = Path("stages/bench/results.json")
NUMBERS = Path("stages/tools/prose/numbers.toml")
BLOCKS = tables.BLOCKS | ideas.BLOCKS | model_card.BLOCKS | peers.BLOCKS | two_ranks.BLOCKS
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- /figures -->)", re.DOTALL)
NUMBER = r"(?<![\d.,])-?\d(?:[\d,.]*\d)?%?(?![\d%])"


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
    stages = [*(root / stage.path for stage in load(root).lessons), root / "stages" / "museum"]
    folders = [root, root / "stages", *stages, root / "nanovllm", root / "models" / "storyteller", root / "notebooks"]
    pages = [path for folder in folders for path in sorted(folder.glob("*.md")) if path.name != "DIFF.md"]
    pages += (root / "nanovllm" / "docs").glob(peers.PAGE)  # the other pages have tests of their own
    return pages + sorted((root / "notebooks").glob(peers.PICTURE)) + sorted((root / "notebooks").glob("*.ipynb"))


def render(path: Path, root: Path) -> str:
    """Return the text of a file with its numbers filled in. Raise ValueError if a key or a sentence is missing."""
    if path.name == peers.PICTURE:
        return peers.picture(json.loads(path.with_name(peers.REPORT).read_text(encoding="utf-8")))
    results = known(root)

    def show(key: str, spec: str) -> str:
        try:
            return shown(results, key, spec)
        except KeyError:
            raise ValueError(f"{path}: {RESULTS} has no {key}") from None

    def block(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        if name not in BLOCKS:
            raise ValueError(f"{path}: no function makes the block {name!r}")
        return start + BLOCKS[name](results) + end

    try:
        text = fill_in(path.read_text("utf-8"), sentences(root).get(path, []), show)
    except LookupError as error:
        raise ValueError(f"{path}: {error}") from None
    return BLOCK.sub(block, text)


def sentences(root: Path = ROOT) -> dict[Path, list[str]]:
    """Return the pieces of sentences in numbers.toml by the file that they are in."""
    return {root / name: pieces for name, pieces in tomllib.loads((root / NUMBERS).read_text("utf-8")).items()}


def fill_in(text: str, pieces: Sequence[str], show: Callable[[str, str], str]) -> str:
    r"""Return the text with new numbers in its sentences: show(key, format) for each place.

    A space in a piece matches a line break too, and a number that is current keeps its line breaks. Raise LookupError
    unless each piece occurs exactly once outside generated blocks.

    >>> fill_in("It puts 9 tokens\nthrough.", ["puts {s4.tokens:,} tokens through"], lambda key, spec: f"{1200:{spec}}")
    'It puts 1,200 tokens\nthrough.'
    """
    for piece in pieces:
        pattern, places = parse(piece)
        outside = BLOCK.sub(lambda match: "\0" * len(match[0]), text)
        matches = list(pattern.finditer(outside))
        if len(matches) != 1:
            raise LookupError(f"{piece!r} in {NUMBERS} must occur once, and occurs {len(matches)} times")
        for group, place in reversed(list(enumerate(places, start=1))):
            start, end = matches[0].span(group)
            if " ".join(text[start:end].split()) != (number := show(*place)):
                text = text[:start] + number + text[end:]
    return text


def parse(piece: str) -> tuple[re.Pattern[str], list[tuple[str, str]]]:
    """Return the pattern of a piece of a sentence, and the key and format of each place in it."""
    pattern, places = "", []
    for words, key, spec, _ in Formatter().parse(piece):
        pattern += spaced(words)
        if key is not None:
            pattern += "([^\0]+?)" if key.endswith("machine") else f"({number_pattern(spec or '')})"
            places.append((key, spec or ""))
    return re.compile(pattern), places


def number_pattern(spec: str) -> str:
    """Return the pattern of a number, and of all forms that a figure in this format may have."""
    _, words = parts_of(spec)
    number = rf"(?:{NUMBER}\s+{spaced(words)}|{spaced(SAME[words])})" if words else NUMBER
    return rf"{number}(?:\s+\({NUMBER}\s+to\s+{NUMBER}(?:\s+times)?\))?"


def spaced(words: str) -> str:
    """Return the pattern of words, in which a space matches a line break too."""
    return r"\s+".join(map(re.escape, re.split(r"\s+", words)))


def known(root: Path) -> dict[str, Any]:
    """Return everything that a place can name: measured results, and "facts" counted here."""
    results: dict[str, Any] = read(root / RESULTS)
    return results | {"facts": facts(root)}


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@cache
def facts(root: Path) -> dict[str, Any]:
    """Return the numbers that are counted, not measured: they are always current."""
    model = read(root / "models/storyteller/config.json")
    heads_and_sizes = model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"]
    bytes_per_token = 2 * heads_and_sizes * 4  # a key and a value, float32
    with safe_open(root / "models/storyteller/model.safetensors", framework="pt") as file:
        num_parameters = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return {
        "bytes_per_token": bytes_per_token,
        "weights_in_texts": 4 * num_parameters / (bytes_per_token * model["max_position_embeddings"]),
        **{f"{stage.key}_lines": added_lines(stage) for stage in load(root).lessons},
        **{f"{stage.key}_minutes": stage.minutes for stage in load(root).lessons if stage.steps},  # of its exercise
        "million_parameters": num_parameters / 1e6,
        "two_ranks": two_ranks.facts(),
    }
