"""python -m tests.live_picture: write notebooks/live.png, a server's page while a chat and other requests run."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nanovllm.tests.testing.processes import until
from nanovllm.tests.testing.served import Served, serving
from tests.browser import browser
from tests.helpers import ROOT

PICTURE = ROOT / "notebooks" / "live.png"
SIZE = {"width": 1280, "height": 790}
REQUESTS = [
    {"prompt": "The king had two daughters, and the elder", "max_tokens": 500},
    {"prompt": "A little girl went into the wood", "max_tokens": 500, "n": 2},
]
MESSAGES = [
    "Tell me about a fox who lived in the Green Forest.",
    "What did he have for dinner?",
    "What did Reddy Fox say to Peter Rabbit?",  # with two samples
]
MAX_TOKENS, MIN_TOKENS = 60, 40  # of a whole answer, and of the two answers that are on their way


def send(page: Any, message: str) -> None:
    page.fill("#words", message)
    page.press("#words", "Enter")


def num_tokens(facts: str) -> int:
    """Return the number of tokens that a turn has so far, from its line of facts."""
    match = re.search(r"(\d+) tokens,", facts)
    return int(match[1]) if match else 0


def make_picture(served: Served, picture: Path) -> None:
    """Take a screenshot of the page. It may show texts, because the model comes with the repository."""
    with browser() as chromium, ThreadPoolExecutor(len(REQUESTS)) as clients:
        page = chromium.new_page(viewport=SIZE)
        page.goto(served.url)
        page.get_by_text("No requests are running").wait_for()
        page.fill("#most", str(MAX_TOKENS))
        *earlier, last = MESSAGES
        for message in earlier:
            send(page, message)
            page.locator("#send:text-is('Send')").wait_for()
        for seed, body in enumerate(REQUESTS):
            clients.submit(served.completion, seed=seed, temperature=0.7, **body)
        until(lambda: page.locator("#running .tag").count() == 3)
        page.locator("#samples input[value='2']").check(force=True)
        send(page, last)
        until(lambda: num_tokens(page.locator(".turn:nth-child(3) .facts").inner_text()) >= MIN_TOKENS)
        page.screenshot(path=picture)


if __name__ == "__main__":
    with serving(
        "--chat-template", "plain", "--show-text", "--kv-cache-tokens", "2048", "--max-num-seqs", "6"
    ) as served:
        make_picture(served, PICTURE)
    print(f"{PICTURE.name}  {PICTURE.stat().st_size / 1024:.0f} KB")
