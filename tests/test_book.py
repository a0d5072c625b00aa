"""`make book`: the course as a website. Its pages' sources; then, built, its links, its search and its looks."""

import os
import posixpath
import re
import runpy
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from stages.tools.prose.ideas import book_block
from tests.browser import NARROW, WIDE, browser, skip_without_chromium
from tests.helpers import ROOT

SOURCE = "https://example.org/blob/main"
FIRST = "stages/README"  # the page that the site's address shows
STAGES = sorted(path.parent.name for path in [*ROOT.glob("stages/s*/README.md"), *ROOT.glob("stages/more_*/README.md")])


# The sources. Sphinx isn't needed, so every run checks them


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """Return the text of each page by its name, as Sphinx gets it."""
    return read_sources(ROOT)


def read_sources(root: Path) -> dict[str, str]:
    conf: dict[str, Any] = runpy.run_path(str(root / "book" / "conf.py"))
    texts = {}
    for path in sorted({path for pattern in conf["include_patterns"] for path in root.glob(pattern)}):
        name = path.relative_to(root).with_suffix("").as_posix()
        content = [path.read_text(encoding="utf-8")]
        conf["read_source"](None, name, content)
        texts[name] = content[0]
    return texts


def unlisted(sources: dict[str, str]) -> set[str]:
    """Return the pages that no table of contents leads to."""
    listed = {FIRST}
    for name, text in sources.items():
        for entries in re.findall(r"^```\{toctree\}\n(?::.*\n)*\n((?:.+\n)+)```", text, re.MULTILINE):
            patterns = [posixpath.join("/", posixpath.dirname(name), entry) for entry in entries.split()]
            listed |= {page for page in sources if any(PurePosixPath(f"/{page}").match(each) for each in patterns)}
    return sources.keys() - listed


def links_out(sources: dict[str, str]) -> list[tuple[str, str]]:
    """Return the links to pages that the book does not have, and to pictures that the repository does not have."""
    missing = []
    for name, text in sources.items():
        for link in re.findall(r"\]\(([\w./-]+\.(?:md|ipynb|svg|png))(?:#[\w-]+)?\)", text):
            target = (ROOT / name).parent.joinpath(link).resolve()
            page = target.relative_to(ROOT).with_suffix("").as_posix()
            if not target.is_file() or (target.suffix in (".md", ".ipynb") and page not in sources):
                missing.append((name, link))
    return missing


def test_contents_list_every_page(sources):
    assert unlisted(sources) == set() and len(sources) > 40
    assert unlisted(sources | {"stages/LOST": "# Lost"}) == {"stages/LOST"}


def test_pages_link_to_pages_of_the_book(sources):
    assert links_out(sources) == []
    lost = sources | {"stages/LOST": "[a](README.md) [b](../tests/README.md) [c](bench/gpu/parts.md#top) ![d](no.svg)"}
    assert [link for _, link in links_out(lost)] == ["../tests/README.md", "bench/gpu/parts.md", "no.svg"]


def test_readme_links_to_the_book_once_it_has_an_address(tmp_path):
    assert (block := book_block({})) in (ROOT / "README.md").read_text(encoding="utf-8") and "`make book`" in block
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text('[project]\nurls = {Documentation = "https://example.org/book/"}')
    assert "](https://example.org/book/)" in book_block({}, pyproject)


# The website


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> Path:
    """Build the book. A warning is an error."""
    pytest.importorskip("myst_nb", reason="make book installs it")
    folder = tmp_path_factory.mktemp("book")
    command = ["make", "book", f"OUT={folder}", f"PY={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"BOOK_SOURCE": SOURCE}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.base = path
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors.add(values.get("id") or "")
        if tag == "base":
            self.base = self.base.parent / (values.get("href") or "")
            return
        self.links += [link for link in (values.get("href"), values.get("src")) if link]


@pytest.mark.nightly
def test_book_has_every_page(book):
    pages = {str(path.relative_to(book)) for path in book.rglob("*.html")}
    for stage in STAGES:
        assert {f"stages/{stage}/README.html", f"stages/{stage}/DIFF.html", f"notebooks/{stage}.html"} <= pages
    docs = {f"nanovllm/docs/{path.stem}.html" for path in (ROOT / "nanovllm" / "docs").glob("*.md")}
    others = {
        "index.html",
        "README.html",
        "pool.html",
        "stages/README.html",
        "notebooks/claims.html",
        "ARCHITECTURE.html",
    }
    assert docs | others <= pages and not any(page.startswith((".", "tests", "exercises")) for page in pages)


@pytest.mark.nightly
def test_links_lead_somewhere(book):
    pages = {path: Page(path) for path in book.rglob("*.html") if "_static" not in path.parts}
    missing = []
    for path, page in pages.items():
        for link in page.links:
            url = urlsplit(link)
            if link.startswith(f"{SOURCE}/"):
                if not ROOT.joinpath(link.removeprefix(f"{SOURCE}/")).exists():
                    missing.append((path.name, link))
            elif not url.scheme:
                target = (page.base.parent / unquote(url.path)).resolve() if url.path else page.base
                if not target.is_file() or (target in pages and unquote(url.fragment) not in pages[target].anchors):
                    missing.append((path.name, link))
    assert missing == [] and sum(len(page.links) for page in pages.values()) > 1000


@pytest.mark.nightly
def test_notebooks_show_their_stored_pictures(book):
    pictures = 0
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        stored = path.read_text(encoding="utf-8").count('"image/svg+xml": [')
        assert (book / "notebooks" / f"{path.stem}.html").read_text(encoding="utf-8").count("<img") >= stored
        pictures += stored
    assert pictures > 10


@pytest.mark.nightly
def test_reference_documents_the_public_interface(book):
    text = (book / "book" / "reference.html").read_text(encoding="utf-8")
    ids = {*re.findall(r'id="nanovllm\.([\w.]+)"', text)}
    assert {
        "LLM.generate",
        "AsyncLLM.generate",
        "SamplingParams.temperature",
        "EngineArgs",
        "RequestOutput.outputs",
    } <= ids
    assert "0 picks the likeliest token" in text, "the help text of a field"


# In a browser


@pytest.fixture(scope="module")
def chromium():
    skip_without_chromium()
    with browser() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def address(book):
    """Serve the book, as a code host does."""
    handler = partial(SimpleHTTPRequestHandler, directory=book)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def page(chromium, address):
    context = chromium.new_context(viewport=WIDE)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(address) else errors.append(request.url))
    page.goto(address)
    yield page
    assert errors == [], "an error in a script, or a request to another host"
    context.close()


@pytest.mark.nightly
def test_the_address_shows_the_first_page(page, address):
    assert page.inner_text("h1").startswith("The path") and "Stage 1" in page.inner_text(".sidebar-tree")
    page.click("table a:has-text('2, block manager')")
    assert "Stage 2" in page.inner_text("h1")
    page.click(".sidebar-brand")
    assert page.url == f"{address}/{FIRST}.html" and page.inner_text("h1").startswith("The path")


@pytest.mark.nightly
def test_search_finds_a_lesson(page):
    page.fill(".sidebar-search", "watermark preempt")
    page.press(".sidebar-search", "Enter")
    result = page.locator("#search-results li a", has_text="Stage 4").first
    result.click()
    assert "s4_continuous_batching" in page.url and "Stage 4" in page.inner_text("h1")


@pytest.mark.nightly
def test_sidebar_leads_from_stage_to_stage(page):
    page.click(".sidebar-tree a:has-text('Stage 1')")
    assert "Stage 1" in page.inner_text("h1")
    page.click(".related-pages .next-page")
    page.click(".related-pages .next-page")
    assert "Stage 2" in page.inner_text("h1"), "behind stage 1 and its diff"


@pytest.mark.nightly
def test_book_has_a_light_and_a_dark_scheme(page):
    def background() -> int:
        return sum(map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]))

    page.emulate_media(color_scheme="light")
    assert background() > 700
    page.emulate_media(color_scheme="dark")
    assert background() < 100


@pytest.mark.nightly
def test_no_page_is_wider_than_a_phone(page, address, book):
    page.set_viewport_size(NARROW)
    wide = {}
    for path in sorted(book.rglob("*.html")):
        if not {"_static", "_modules"} & {*path.parts} and path.name != "pool.html":
            page.goto(f"{address}/{path.relative_to(book)}")
            width = page.evaluate("document.documentElement.scrollWidth")
            if width > NARROW["width"]:
                wide[str(path.relative_to(book))] = width
    assert wide == {}
