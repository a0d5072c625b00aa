"""Checks of prose against the repository: its links, files, commands, names and numbers.

Each check yields faults as text. tests/test_prose.py also shows on made-up prose that the checks find faults.
"""

import ast
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from stages.tools.prose.figures import shown
from stages.tools.prose.marks import fill_in, parse, sentences

SKIPPED = {"exercises", "build", "dist", "node_modules", "__pycache__"}  # and hidden folders
GENERATED = re.compile(r"<!-- figures: (\w+) -->.*?<!-- /figures -->", re.DOTALL)
WRITTEN = re.compile(r"<!-- (memory|paper|mutants|kernels) -->.*?<!-- /\1 -->", re.DOTALL)  # by commands of these names
FENCE = re.compile(r"^```([\w ]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)((?:    [^\n]*\n(?:\n(?=    ))?)+)")  # a code block, not the rest of a list
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"[\w.*/-]+\.(?:py|md|toml|txt|json|ipynb|svg|safetensors|model)")
NOT_HERE = {".venv", "exercises"}  # created by commands, ignored by git
NOT_HERE |= {"org", "tokenizer.json", "model.safetensors.index.json", "adapter_config.json"}  # of other checkpoints
NOT_HERE |= {"step.py"}  # a script that the reader writes


class Prose(NamedTuple):
    path: Path
    text: str

    @property
    def by_hand(self) -> str:
        """Return the text without generated figures, and without the numbers that numbers.toml fills in."""
        pieces = sentences().get(self.path, [])
        return GENERATED.sub("\n", fill_in(WRITTEN.sub("", self.text), pieces, lambda key, spec: " "))

    @property
    def code_blocks(self) -> list[str]:
        """Return fenced and indented blocks, without their indentation."""
        fenced = [match[2] for match in FENCE.finditer(self.by_hand)]
        indented = INDENTED.findall(FENCE.sub("", self.by_hand))
        return fenced + [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in indented]

    @property
    def sentences(self) -> str:
        """Return the text without blocks of code and generated figures."""
        return INDENTED.sub("\n", FENCE.sub("\n", self.by_hand))

    @property
    def spans(self) -> list[str]:
        return SPAN.findall(self.sentences)


def find_prose(root: Path, suffix: str = ".md") -> list[Path]:
    return sorted(path for path in find_files(root) if path.suffix == suffix)


def find_files(root: Path) -> Iterator[Path]:
    """Yield the files below `root`. Skipped folders are never entered: environments have tens of thousands of files."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED and not name.startswith(".")]
        yield from (Path(folder, name) for name in names)


def read(path: Path) -> Prose:
    """Read a page, or the Markdown cells of a notebook."""
    text = path.read_text(encoding="utf-8")
    return Prose(path, "\n\n".join(cells(text, "markdown")) + "\n" if path.suffix == ".ipynb" else text)


def cells(notebook: str, kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(notebook)["cells"] if cell["cell_type"] == kind]


def titles(notebook: str) -> list[str]:
    r"""Return the titles that code cells give to pictures, without formatted values.

    A title is the value of `finding` or `title`, or an argument of figure().

    >>> cell = 'finding = f"{n} in 12 ms"\npictures.figure("Slow")'
    >>> titles(json.dumps({"cells": [{"cell_type": "code", "source": [cell]}]}))
    [' in 12 ms', 'Slow']
    """
    nodes = [node for cell in cells(notebook, "code") for node in ast.walk(ast.parse(cell))]
    assigned = [node for node in nodes if isinstance(node, ast.Assign)]
    named = [node.value for node in assigned if ast.unparse(node.targets[0]) in ("finding", "title")]
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("figure")]
    texts = (part for node in named + [call.args[0] for call in calls if call.args] for part in ast.walk(node))
    return [part.value for part in texts if isinstance(part, ast.Constant) and isinstance(part.value, str)]


class Repository:
    """A repository, and the things in it that prose can name."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def files(self) -> list[Path]:
        return [*find_files(self.root)]

    @cached_property
    def stages(self) -> list[Path]:
        names = [*self.root.glob("stages/s*_*/__init__.py"), *self.root.glob("stages/more_*/__init__.py")]
        return sorted(path.parent for path in names)

    @cached_property
    def targets(self) -> set[str]:
        return set(re.findall(r"^([a-z]\w*):", (self.root / "Makefile").read_text(), re.MULTILINE))

    @cached_property
    def names(self) -> set[str]:
        """Return all identifiers in the code, the words of its strings (options, keys), of settings, and test names."""
        texts = (names_in(path.read_text(encoding="utf-8")) for path in self._code)
        return {*chain.from_iterable(texts)} | self._words_of_settings | self._tests

    @cached_property
    def classes(self) -> dict[str, list[Path]]:
        classes: dict[str, list[Path]] = {}
        for path in self._code:
            for name in re.findall(r"^\s*class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
                classes.setdefault(name, []).append(path)
        return classes

    @property
    def _code(self) -> list[Path]:
        files = [path for path in self.files if path.suffix == ".py"]
        fixtures = [path for path in files if path.parent.name == "testing" or path.name == "conftest.py"]
        return fixtures + [path for path in files if "tests" not in path.relative_to(self.root).parts]

    @property
    def _tests(self) -> set[str]:
        files = (path.read_text(encoding="utf-8") for path in self.files if path.match("test_*.py"))
        return {name for text in files for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}

    @property
    def _words_of_settings(self) -> set[str]:
        settings = [path for path in self.files if re.fullmatch(r".*\.toml|.*config\.json|Makefile", path.name)]
        return {word for path in settings for word in re.findall(r"[A-Za-z_]\w*", path.read_text(encoding="utf-8"))}

    def has_file(self, name: str, near: Path) -> bool:
        """Look for a file next to `near`, at the root, in stages/ and in each stage, or everywhere for a bare name."""
        name = name.rstrip("/")
        folders = [near.parent, self.root, self.root / "stages", *self.stages]
        if any((folder / name).exists() or ("*" in name and any(folder.glob(name))) for folder in folders):
            return True
        return "/" not in name and any(path.match(name) for path in self.files)

    def has_module(self, name: str) -> bool:
        if name.startswith("exercises."):  # a copy of a stage
            return any((self.root / "stages").glob(f"{name.removeprefix('exercises.')}*/__main__.py"))
        path = self.root.joinpath(*name.split("."))
        return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


@cache
def names_in(text: str) -> set[str]:
    """Return the identifiers of a program, and the words of its strings."""
    names: set[str] = set()
    nodes = [*ast.walk(ast.parse(text))]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        for field in ("id", "attr", "name", "arg", "asname"):
            value = getattr(node, field, None)
            names.update(value.split(".") if isinstance(value, str) else ())
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            names.update(re.findall(r"[A-Za-z_]\w*", node.value.replace("-", "_")))
            names.update(re.findall(r"[A-Za-z_]\w*", node.value))
    return names


# The checks


def link_faults(prose: Prose) -> Iterator[str]:
    """Yield links to missing files and headings."""
    for target in LINK.findall(FENCE.sub("", prose.text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, heading = target.partition("#")
        path = prose.path.parent / name if name else prose.path
        if not path.exists():
            yield f"link to {name}: no such file"
        elif heading and heading not in headings(path):
            yield f"link to {target}: no such heading"


def headings(path: Path) -> set[str]:
    """Return the anchors that code hosts give to the headings of a page.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "a.md"); _ = path.write_text("# Is it right? Is it fast?")
    >>> headings(path)
    {'is-it-right-is-it-fast'}
    """
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def file_faults(prose: Prose, repository: Repository) -> Iterator[str]:
    """Yield paths in backticks that do not exist."""
    for span in prose.spans:
        if is_path(span) and not repository.has_file(span, prose.path):
            yield f"`{span}`: no such file or folder"


def is_path(span: str) -> bool:
    """Return True if a span names a file or folder of the repository.

    >>> [is_path(span) for span in ("llama/", "stages/chain.py", "*.safetensors", "q.k / v", "top_k")]
    [True, True, True, False, False]
    """
    if span.split("/")[0] in NOT_HERE:
        return False
    return bool(FILE.fullmatch(span) or re.fullmatch(r"[\w.-]+(/[\w.-]+)*/", span) or re.fullmatch(r"\w+(/\w+)+", span))


def command_faults(prose: Prose, repository: Repository) -> Iterator[str]:
    """Yield make targets, modules, scripts and flags of commands that do not exist."""
    lines = [line for block in prose.code_blocks for line in block.splitlines()] + prose.spans
    for line in lines:
        words = line.removeprefix("$ ").split("#")[0].split()
        if not words or not re.fullmatch(r"make|python\d?|\S*/python\d?|pytest|nanovllm", words[0]):
            continue
        for fault in one_command(words, repository):
            yield f"{line.strip()}: {fault}"


def one_command(words: list[str], repository: Repository) -> Iterator[str]:
    program, *arguments = words
    if program == "make":
        target = next((word for word in arguments if re.fullmatch(r"[a-z]+", word)), None)
        if target and target not in repository.targets:
            yield f"the Makefile has no target {target}"
    elif program == "nanovllm" and arguments and not arguments[0].startswith("-"):
        commands = (repository.root / "nanovllm" / "cli" / "commands.py").read_text(encoding="utf-8")
        if f'"{arguments[0]}": ' not in commands:
            yield f"nanovllm has no command {arguments[0]}"
    elif arguments[:1] == ["-m"]:
        module, *rest = arguments[1:]
        if module not in ("pytest", "pip", "venv", "doctest") and not repository.has_module(module):
            yield f"no module {module}"
        numbers = [word for word in rest[:1] if module == "stages" and word.isdigit()]
        if (
            module == "stages"
            and rest
            and rest[0].startswith("more_")
            and not repository.has_module(f"stages.{rest[0]}")
        ):
            yield f"there is no branch {rest[0]}"
        if numbers and not any(folder.name.startswith(f"s{numbers[0]}_") for folder in repository.stages):
            yield f"there is no stage {numbers[0]}"
    elif arguments and arguments[0].endswith(".py") and not (repository.root / arguments[0]).exists():
        yield f"no file {arguments[0]}"
    if program != "pytest" and "pip" not in arguments:
        words = [word.strip("\"'") for word in " ".join(arguments).replace("ARGS=", "").split()]
        for flag in (word.split("=")[0] for word in words if re.match(r"--\w", word)):
            name = flag[2:].replace("-", "_")
            if flag != "--help" and not {name, name.removeprefix("no_")} & repository.names:
                yield f"no command has the option {flag}"


def name_faults(prose: Prose, repository: Repository, foreign: set[str]) -> Iterator[str]:
    """Yield names in backticks that are not in the code."""
    for span in prose.spans:
        if is_path(span) or re.match(r"(make|python\d?|git|pip|pytest|nanovllm|\.venv|exercises)\b", span):
            continue
        words = re.sub(r"(?<=\w)-(?=\w)", "_", span.replace("--no-", "--"))
        for name in re.findall(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", words):
            fault = one_name(name, repository, foreign)
            if fault:
                yield f"`{span}`: {fault}"


def one_name(name: str, repository: Repository, foreign: set[str]) -> str | None:
    first, *rest = name.split(".")
    if first in foreign or name in foreign:
        return None
    unknown = [part for part in (first, *rest) if part not in repository.names]
    if unknown:
        return f"no {unknown[0]} in the code"
    if first in repository.classes and rest:
        sources = [path.read_text(encoding="utf-8") for path in repository.classes[first]]
        if not any(re.search(rf"\b{rest[0]}\b", source) for source in sources):
            return f"{first} has no {rest[0]}"
    return None


UNITS = (
    "tok/s|tokens?/s|tokens a second|requests?/s|ms|us|µs|ns|s|seconds?|hours?|%|percent|times|x|[KMGT]i?B(?:/s)?|bytes"
    "|[GT]FLOP/s|million|billion(?! parameters)|nats|lines|parameters|cores?"
)
MEASURED = re.compile(rf"(?<![\w.])\d[\d,.]*[\s-]?(?:{UNITS})(?![\w/])")


def number_faults(prose: Prose, allowed: Iterable[str] = ()) -> Iterator[str]:
    """Yield numbers with a unit that were typed by hand: measurements come from results.json.

    `allowed` are definitions, and numbers that others measured.
    """
    sentences = re.sub(r"\s+", " ", SPAN.sub(" ", prose.sentences))
    for text in (" ".join(each.split()) for each in allowed):
        if text not in sentences:
            yield f"{text!r} is allowed but not in the text: remove it from the list"
        sentences = sentences.replace(text, " ")
    for match in MEASURED.finditer(sentences):
        around = sentences[max(0, match.start() - 30) : match.end() + 20]
        yield f"{match[0]!r} was typed by hand in {around!r}: let stages/tools/prose write it"


def mark_faults(prose: Prose) -> Iterator[str]:
    """Yield marks of figures that do not close: they would never be filled in."""
    opened, closed = prose.text.count("<!-- figures:"), prose.text.count("<!-- /figures -->")
    if not len(GENERATED.findall(prose.text)) == opened == closed:
        yield f"{opened} figures marks open, {closed} close"


def form_faults(pieces: Iterable[str], results: Mapping[str, Any]) -> Iterator[str]:
    """Yield keys that two sentences format differently, such as 1.1 and 1.13."""
    texts: dict[str, set[str]] = {}
    for key, spec in (place for piece in pieces for place in parse(piece)[1]):
        texts.setdefault(key, set()).add(shown(results, key, spec))
    for key, forms in texts.items():
        if len(forms) > 1:
            yield f"{key} is shown as " + " and as ".join(sorted(forms))
