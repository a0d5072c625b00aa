"""python -m tests.live_picture: write notebooks/live.png, the page of `nanovllm serve` while five requests run."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nanovllm.tests.testing.processes import until
from nanovllm.tests.testing.served import Served, serving
from tests.browser import browser
from tests.helpers import ROOT

PICTURE = ROOT / "notebooks" / "live.png"
SIZE = {"width": 1280, "height": 530}
MIN_STEPS = 170  # the first request has ended by then
REQUESTS = [
    {"prompt": "Once upon a time there was a fox", "max_tokens": 120},
    {"prompt": "Once upon a time there was a fox", "max_tokens": 400, "n": 3},
    {"prompt": "The king had two daughters, and the elder", "max_tokens": 400},
    {"prompt": "A little girl went into the wood", "max_tokens": 400, "n": 2},
]


def make_picture(served: Served, picture: Path) -> None:
    """Take a screenshot of the page. It may show texts, because the model comes with the repository."""
    with browser() as chromium, ThreadPoolExecutor(len(REQUESTS)) as clients:
        page = chromium.new_page(viewport=SIZE)
        page.goto(served.url)
        page.get_by_text("No requests are running").wait_for()
        for seed, body in enumerate(REQUESTS):
            clients.submit(served.completion, seed=seed, temperature=0.7, **body)
        until(lambda: int(page.locator("input[type=range]").get_attribute("max")) >= MIN_STEPS)
        page.screenshot(path=picture)


if __name__ == "__main__":
    with serving("--show-text", "--kv-cache-tokens", "2048", "--max-num-seqs", "6") as served:
        make_picture(served, PICTURE)
    print(f"{PICTURE.name}  {PICTURE.stat().st_size / 1024:.0f} KB")
