"""A real browser for tests: the system's Chromium. Nothing downloads one."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
WHERE = "no Chromium: install it (apt-get install chromium), or set CHROMIUM=/path/to/it"


def find_chromium() -> str | None:
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def require_chromium() -> str:
    """For the top of a test file: without a browser all of it is skipped, in one line; in CI that is an error."""
    path = find_chromium()
    if path is None and os.environ.get("CI", "").lower() in ("1", "true"):
        raise FileNotFoundError(WHERE)
    if path is None:
        pytest.skip(WHERE, allow_module_level=True)
    pytest.importorskip("playwright.sync_api")
    return path


@contextmanager
def browser(path: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=["--no-sandbox"] if is_root else [])
        try:
            yield chromium
        finally:
            chromium.close()
