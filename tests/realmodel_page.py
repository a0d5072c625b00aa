"""A conversation with SmolLM2 135M through a server's page, in a real browser. Run by `make realmodel`."""

import re

from nanovllm.checkpoints.hub import find_checkpoint
from nanovllm.tests.realmodel import QUESTION
from nanovllm.tests.testing.served import serving
from tests.browser import browser
from tests.test_page_chat import Chat


def test_conversation_through_the_page():
    system, question = (message["content"] for message in QUESTION)
    with serving(model=find_checkpoint("smollm2"), backend="auto") as served, browser() as chromium:
        reader = Chat(chromium, f"{served.url}/")
        reader.page.wait_for_selector("#chat", state="visible")
        reader.page.locator("#system-part:not([open]) summary").click()
        reader.page.fill("#system", system)
        for city, text in (("Paris", question), ("Tokyo", "What is the capital of Japan?")):
            reader.say(text)
            [answer] = reader.answers()
            assert city in answer
        cached = re.match(r"(\d+) of \d+ prompt tokens cached", reader.facts())
        assert cached and int(cached[1]) >= 32 and reader.messages == []
