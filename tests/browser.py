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


def skip_without_chromium() -> None:
    """For the top of a test file: without a browser all of it is skipped, in one line. In CI each test fails."""
    if find_chromium() is None and os.environ.get("CI", "").lower() not in ("1", "true"):
        pytest.skip(WHERE, allow_module_level=True)
    pytest.importorskip("playwright.sync_api")


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = find_chromium()
    if path is None:
        pytest.fail(WHERE, pytrace=False)
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=["--no-sandbox"] if is_root else [])
        try:
            yield chromium
        finally:
            chromium.close()
