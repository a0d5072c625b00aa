"""A real browser for tests: the system's Chromium, never a downloaded one."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from notebooks.page.build import PAGE, modules

NAMES = ("chromium", "chromium-browser", "google-chrome")
HELP = "no Chromium: install it (apt-get install chromium), or set CHROMIUM=/path/to/it, or NO_BROWSER=1 to skip"
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 360, "height": 780}
PAPER = {"light": "rgb(251, 250, 248)", "dark": "rgb(21, 24, 27)"}  # the page's background
EXPORTS = """async names => {
    const isBuilt = typeof modules !== "undefined", url = name => new URL(`page/${name}`, document.baseURI).href;
    const exports = await Promise.all(names.map(name => isBuilt ? modules[name] : import(url(name))));
    globalThis.Page = Object.assign({}, ...exports);
}"""


def find_chromium() -> str | None:
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def is_needed() -> bool:
    """Return whether this is CI, or .ci/run elsewhere."""
    return bool(os.environ.get("NEEDS_BROWSER")) or os.environ.get("CI", "").lower() in ("1", "true")


def skip_without_chromium() -> None:
    """Skip a test file in one line if there is no browser. In CI, its tests fail instead, unless NO_BROWSER is set."""
    if find_chromium() is None and (os.environ.get("NO_BROWSER") or not is_needed()):
        pytest.skip(HELP, allow_module_level=True)
    pytest.importorskip("playwright.sync_api")


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = find_chromium()
    if path is None:
        pytest.fail(HELP, pytrace=False)
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=["--no-sandbox"] if is_root else [])
        try:
            yield chromium
        finally:
            chromium.close()


class Reader:
    """A reader of the page, and a record of its console messages, errors and requests."""

    def __init__(self, chromium: Any, address: str = PAGE.as_uri(), viewport: dict[str, int] = WIDE) -> None:
        self.context = chromium.new_context(viewport=viewport)
        self.context.set_default_timeout(60_000)  # for busy machines
        self.page = self.context.new_page()
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.open(address)

    def open(self, address: str) -> None:
        """Open a page. Its scripts see the exports of the page's modules as the global `Page`."""
        self.page.goto(address)
        self.page.evaluate(EXPORTS, modules())

    def reload(self) -> None:
        self.page.reload()
        self.page.evaluate(EXPORTS, modules())

    def go(self, fragment: str) -> None:
        """Change the address, as if the reader had typed it."""
        self.page.evaluate(
            """fragment => new Promise(resolve => {
            Page.flushAddress(); // or its timer may undo the change before the page has seen it
            if (location.hash === fragment) return resolve();
            addEventListener("hashchange", () => resolve(), { once: true });
            location.hash = fragment;
        })""",
            fragment,
        )

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    @property
    def fragment(self) -> str:
        return self.page.evaluate("Page.flushAddress() ?? location.hash")  # the page updates it a little later

    @property
    def step(self) -> int:
        return int(self.text("#step").split(" / ")[0])

    def square(self, block: int) -> Any:
        return self.page.locator("#grid .square").nth(block)
