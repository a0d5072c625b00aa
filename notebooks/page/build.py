"""Build notebooks/pool.html, one file that needs no network, from nanovllm/server/page and the runs of all stages."""

import ast
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanovllm.trace.events import KEYS, WITHOUT_BY, Event
from notebooks.page.animation import PICTURE, picture
from notebooks.page.moments import moments
from notebooks.page.record import ROOT, WALL_CLOCK, Run, record
from stages.bench.engines import PACKAGES

SOURCE = ROOT / "nanovllm" / "server" / "page"
PAGE = ROOT / "notebooks" / "pool.html"
LEAD = (
    "A server keeps the keys and values of every token it has read, one token per slot of memory. Here, eight "
    "requests, A to H, share 320 slots, and seven stages serve them. F asks for three samples. Stages 1 to 3 get all "
    "requests at once. From stage 4 on, F, G and H arrive while others run."
)
STAGES = {
    "s1": ("One piece", "Each sequence reserves one piece of the pool for its whole life."),
    "s2": ("Blocks", "The pool is cut into blocks of 8 slots. A sequence takes one when its last one is full."),
    "s3": ("Paged attention", "The pool works as in stage 2. Attention now reads its blocks tile by tile."),
    "s4": ("Scheduler", "Each step admits requests that fit, splits long prompts, and preempts if blocks run out."),
    "s5": ("Copy-on-write", "Samples of one prompt share its blocks, until one of them writes."),
    "s6": ("Prefix cache", "A full block stays cached after it is freed, for requests with the same prefix."),
    "s7": ("Offload", "An evicted block moves to host memory, and is loaded back when it is needed."),
}


def build(folder: Path = PAGE.parent) -> list[Path]:
    """Write the page, and README.md's picture of the same runs. Return the two files."""
    recorded = {name: record(name) for name in STAGES}
    texts = {PAGE.name: page(data(recorded)), PICTURE.name: picture(recorded)}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


# ---- one file from many

IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+\.js)";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:(?:async )?function\*?|const|class) (\w+))", re.MULTILINE)
ENTRY = '<script type="module" src="page.js"></script>'
EMPTY_DATA = '<script type="application/json" id="data"></script>'
DATA = re.compile(EMPTY_DATA.replace("></", ">(.*?)</"))


def page(content: dict[str, Any] | None) -> str:
    """Return index.html with its style sheets, its scripts and its data inside. None builds a page without runs."""
    html = read("index.html")
    assert ENTRY in html and EMPTY_DATA in html, "index.html must have one script and one place for data"
    html = re.sub(r'<link rel="stylesheet" href="(.+?)">', lambda link: f"<style>\n{read(link[1])}</style>", html)
    html = html.replace(ENTRY, f"<script>\n{bundle()}</script>")
    if content is None:
        return html
    packed = json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return html.replace(EMPTY_DATA, EMPTY_DATA.replace("></", f">{packed}</"))


def load(path: Path) -> dict[str, Any]:
    """Return the data of a page."""
    match = DATA.search(path.read_text(encoding="utf-8"))
    assert match, f"{path} was not built by page()"
    content: dict[str, Any] = json.loads(match[1])
    return content


def bundle() -> str:
    """Return all modules as one script, because a page that is opened as a file cannot import any.

    Each module becomes a function that returns its exports:

        modules["a.js"] = (() => { const { b } = modules["b.js"]; ...; return { a }; })();
    """
    parts = ['"use strict";\nconst modules = {};\n']
    for name in modules():
        source = IMPORT.sub(r'const \1 = modules["\2"];', read(name))
        exports = ", ".join(EXPORT.findall(source))
        parts.append(f'modules["{name}"] = (() => {{\n{EXPORT.sub("", source)}return {{ {exports} }};\n}})();\n')
    return "\n".join(parts)


def modules() -> list[str]:
    """Return the file names of page.js and of all modules that it imports, each one after its own imports."""
    names: list[str] = []

    def visit(name: str) -> None:
        for _, imported in IMPORT.findall(read(name)):
            visit(imported)
        if name not in names:
            names.append(name)

    visit("page.js")
    return names


def read(name: str) -> str:
    return (SOURCE / name).read_text(encoding="utf-8")


# ---- the page's data


def data(recorded: dict[str, list[Event]]) -> dict[str, Any]:
    """Return the content of the page's data element."""
    packer = Packer()
    runs = [run_data(name, events, packer) for name, events in recorded.items()]
    return {"lead": LEAD, "runs": runs, "kinds": packer.kinds, "strings": packer.strings}


def run_data(name: str, events: list[Event], packer: "Packer") -> dict[str, Any]:
    title, idea = STAGES[name]
    snapshot, *rest = events
    found = moments(name, Run(events))
    names = {event["by"] for event in rest if event.get("by")} | {each["code"] for each in found if each["code"]}
    return {
        "name": name,
        "title": title,
        "idea": idea,
        "moments": found,
        "sources": excerpts(ROOT / "stages" / PACKAGES[name], names),
        "snapshot": snapshot,
        "events": packer.pack(rest),
    }


# ---- the compact form of events, as unpack() of tape.js reads it: a row per event, each text once

OMITTED = ("kind", "step", *WALL_CLOCK)  # the kind is the row's first number, and the reader counts the steps
TEXTS = ("seq", "request", "carried_by", "why", "by", "hash", "for", "behind", "was", "place", "text", "error")


class Packer:
    """The compact form of events. Texts are numbered as they come, so the same runs give the same numbers."""

    def __init__(self, strings: Iterable[str] = ()) -> None:
        """`strings` are those of runs that were packed before."""
        self.kinds = {kind: columns(kind) for kind in KEYS if kind != "snapshot"}
        self._numbers = {kind: number for number, kind in enumerate(self.kinds)}
        self._strings = {text: number for number, text in enumerate(strings)}

    @property
    def strings(self) -> list[str]:
        return list(self._strings)

    def pack(self, events: Iterable[Event]) -> list[list[Any]]:
        return [self._row(event) for event in events]

    def _row(self, event: Event) -> list[Any]:
        row = [self._value(column, event) for column in self.kinds[event["kind"]]]
        while row and row[-1] is None:
            row.pop()
        return [self._numbers[event["kind"]], *row]

    def _value(self, column: str, event: Event) -> Any:
        value = event.get(column.rstrip("$"))
        if column.endswith("$") and value is not None:
            return self._strings.setdefault(value, len(self._strings))
        return value


def columns(kind: str) -> list[str]:
    """Return the columns of a kind of event. A $ marks a column of texts, which are packed as numbers."""
    names = [name for name in KEYS[kind] if name not in OMITTED]
    names += [] if kind in WITHOUT_BY else ["by"]
    return [f"{name}$" if is_text(kind, name) else name for name in names]


def is_text(kind: str, name: str) -> bool:
    """Return whether a field is a text. `from` is a sequence if one is forked or shared, and else a block."""
    return name in TEXTS or (name == "from" and kind in ("forked", "shared"))


def unpack(kinds: dict[str, list[str]], strings: list[str], rows: Iterable[list[Any]]) -> Iterator[Event]:
    """Yield the events again, without their wall-clock times."""
    names, step = list(kinds), 1
    for number, *values in rows:
        kind = names[number]
        padded = values + [None] * (len(kinds[kind]) - len(values))
        event: Event = {"kind": kind, "step": step}
        for column, value in zip(kinds[kind], padded, strict=True):
            is_number = column.endswith("$") and value is not None
            event[column.rstrip("$")] = strings[value] if is_number else value
        yield event
        step += kind == "step"


# ---- the source of the functions that events name


Excerpt = dict[str, str | int]  # file, line, text


def excerpts(folder: Path, names: set[str]) -> dict[str, Excerpt]:
    """Return the source of each of these functions in a folder's files. Raise ValueError if one is missing."""
    sources = {name: each for name, each in all_excerpts(folder).items() if name in names}
    if missing := names - set(sources):
        raise ValueError(f"{folder.name} has no {', '.join(sorted(missing))}")
    return dict(sorted(sources.items()))


def all_excerpts(folder: Path) -> dict[str, Excerpt]:
    """Return {"BlockPool.touch": {"file", "line", "text"}, ...} for a folder's files, but for those with a mistake."""
    sources: dict[str, Excerpt] = {}
    for path in sorted(folder.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        with suppress(SyntaxError):  # in an exercise
            for name, node in functions(ast.parse(source)):
                file = path.relative_to(folder.parents[1]).as_posix()
                sources.setdefault(name, {"file": file, "line": node.lineno, "text": source_of(source, node)})
    return sources


def functions(tree: ast.Module) -> list[tuple[str, ast.FunctionDef]]:
    """Return (qualified name, node) of each function of a module and each method of its classes."""
    pairs = [(node.name, node) for node in tree.body if isinstance(node, ast.FunctionDef)]
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef):
            pairs += [(f"{owner.name}.{node.name}", node) for node in owner.body if isinstance(node, ast.FunctionDef)]
    return pairs


def source_of(source: str, node: ast.FunctionDef) -> str:
    r"""Return a function's lines, moved to the left margin.

    >>> source = "class A:\n    def f(self) -> None:\n        pass"
    >>> print(source_of(source, ast.parse(source).body[0].body[0]))
    def f(self) -> None:
        pass
    """
    lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
    return "\n".join(line[node.col_offset :] for line in lines)
