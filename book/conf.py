"""Build the course as a website, with Sphinx: `make book`. The repository's own pages are the sources.

Pages link to each other as on a code host. A link to a file of code leads to $BOOK_SOURCE, the address of this
repository's files on a code host. Without that variable, it is plain text.
"""

import inspect
import os
import re
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = os.environ.get("BOOK_SOURCE")

project = html_title = "nanovllm"
root_doc = "stages/README"  # the course's first page, and the site's
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
include_patterns = [
    *(
        "*.md",
        "book/*.md",
        "stages/*.md",
        "stages/s*/*.md",
        "stages/more_*/*.md",
        "stages/museum/*.md",
        "stages/bench/gpu/*/summary.md",
        "notebooks/*.ipynb",
    ),
    *("nanovllm/*.md", "nanovllm/docs/*.md", "nanovllm/trace/*.md", "tests/mutants/*.md", "models/storyteller/*.md"),
]
exclude_patterns = [".*", "build", "dist", "exercises", "gpu-results", "runs"]
smartquotes = False
highlight_language = "text"
nb_execution_mode = "off"  # the repository has the notebooks with their outputs
nb_code_prompt_show = nb_code_prompt_hide = "code"
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
default_role = "code"  # docstrings put names in single backticks

html_theme = "furo"
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_extra_path = ["../notebooks/pool.html"]

LINK = re.compile(r"\[([^\[\]]*)\]\(([\w./-]+)\)")
FOLDED = re.compile(r'"jupyter": \{\s*"source_hidden": true\s*\}')  # Jupyter's way to fold a cell's code
CONTENTS = {
    "The path": "self stages/s*/README stages/more_*/README stages/museum/README stages/SCOREBOARD stages/VLLM "
    "stages/NEXT stages/LEFT_OUT stages/SCALE stages/GPU",
    "Notebooks": "notebooks/s* notebooks/nanovllm notebooks/beyond notebooks/routing notebooks/claims book/errata",
    "The package": "nanovllm/README nanovllm/docs/* nanovllm/trace/EVENTS book/reference",
    "The project": "README ARCHITECTURE CONTRIBUTING CHANGELOG tests/mutants/README models/storyteller/README",
}


def read_source(app: Any, docname: str, content: list[str]) -> None:
    """Turn a page's links to code, folders and the interactive page into links of the site. Add the contents."""

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = (ROOT / docname).parent.joinpath(target).resolve()
        if path.name == "pool.html":
            return f"<a href='{'../' * docname.count('/')}pool.html'>{text}</a>"
        if (path / "README.md").exists():
            return f"[{text}]({target.rstrip('/')}/README.md)"
        if path.suffix in (".md", ".ipynb", ".svg", ".png") or not path.exists():
            return match[0]
        return f"[{text}]({SOURCE}/{path.relative_to(ROOT)})" if SOURCE else text

    content[0] = LINK.sub(link, FOLDED.sub('"tags": ["hide-input"]', content[0]))
    for caption, pages in CONTENTS.items() if docname == root_doc else ():
        entries = "\n".join(page if page == "self" else f"/{page}" for page in pages.split())
        content[0] += f"\n```{{toctree}}\n:caption: {caption}\n:hidden:\n:glob:\n\n{entries}\n```\n"
    if docname.startswith(("stages/s", "stages/more_")) and docname.endswith("/README"):
        content[0] += "\n```{toctree}\n:hidden:\n\nDIFF\n```\n"
    if docname == "stages/GPU":
        content[0] += "\n```{toctree}\n:hidden:\n:glob:\n\nbench/gpu/*/summary\n```\n"


def list_fields(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Add the fields of a dataclass to its docstring, each with its help text or the comment behind it."""
    from sphinx.util.typing import stringify_annotation

    if what != "class" or not is_dataclass(obj):
        return
    for each in fields(obj):
        if each.name not in obj.__annotations__:
            continue  # inherited
        comment = re.search(rf"^    {each.name}: .*  # (.+)$", inspect.getsource(obj), re.MULTILINE)
        text = each.metadata.get("help") or (comment[1] if comment else "")
        default = [f"   :value: {each.default!r}"] if each.default is not MISSING else []
        lines += ["", f".. attribute:: {each.name}", f"   :type: {stringify_annotation(each.type, 'smart')}", *default]
        lines += ["", f"   {text}"]


def write_index(app: Any, exception: Exception | None) -> None:
    """Let the site's address show its first page: a copy, whose links start where the page itself is."""
    if exception is None and app.builder.format == "html":
        page = app.outdir.joinpath(f"{root_doc}.html").read_text(encoding="utf-8")
        base = f'<head>\n    <base href="{root_doc}.html">'
        app.outdir.joinpath("index.html").write_text(page.replace("<head>", base, 1), encoding="utf-8")


def setup(app: Any) -> None:
    """Add the parts above to Sphinx. The module itself needs no Sphinx, so tests can read it without."""
    from pygments.lexers import TextLexer

    app.add_lexer("mermaid", TextLexer)  # shown as text: its own lexer and its drawings would need the network
    app.connect("source-read", read_source)
    app.connect("autodoc-process-docstring", list_fields)
    app.connect("build-finished", write_index)
