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


@contextmanager
def browser() -> Iterator[Any]:
    """Skips the test where there is no browser; in CI that is a failure."""
    path = find_chromium()
    if path is None:
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(WHERE)
        pytest.skip(WHERE)
    sync_api = pytest.importorskip("playwright.sync_api")
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    with sync_api.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=["--no-sandbox"] if is_root else [])
        try:
            yield chromium
        finally:
            chromium.close()
