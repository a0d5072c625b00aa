"""The chat on a server's page, in a real browser: what it sends, what it shows, and the blocks that light up."""

import itertools
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from nanovllm.checkpoints.chat_template import PLAIN_TEMPLATE
from nanovllm.options.engine_args import EngineArgs
from tests.browser import PAPER, WIDE, Reader, browser, skip_without_chromium
from tests.helpers import ROOT
from tests.live import living, until

skip_without_chromium()
pytestmark = pytest.mark.full
CHECKS = Path(__file__).with_name("page_checks.js")
VIEWPORTS = [WIDE, {"width": 900, "height": 800}, {"width": 400, "height": 800}]
OPTIONS = {
    "block_size": 8,
    "kv_cache_tokens": 2048,
    "max_num_seqs": 6,
    "enforce_eager": True,
    "kv_offloading_tokens": 0,
}
BACKGROUND = "getComputedStyle(document.documentElement).backgroundColor"
EVENTS = "kind => Page.runs[0].tape.steps.flat().filter(event => event.kind === kind)"
LIT = "[...document.querySelectorAll('#grid .square')].flatMap((each, i) => each.matches('.lit') ? [i] : [])"
OWN = """texts => {
    const { state } = Page.runs[0].tape.frameAt(Page.at.step);
    const own = state.running.filter(seq => texts.some(text => state.sequences[seq].texts.join("").includes(text)));
    const blocks = own.flatMap(seq => state.sequences[seq].block_table);
    return [own.length, [...new Set(blocks)].sort((a, b) => a - b)];
}"""
LIT_FIELD = """() => {
    const cell = block => ({ block, status: "held", count: 1, bands: [{ seq: "a", from: 0, to: 8, filled: 8 }],
        origin: null, isTouched: false });
    const canvas = Page.make("canvas"), holder = Page.make("div", {}, canvas), field = new Page.Field(canvas, "block");
    Page.byId("pool").append(holder);
    field.shape(1000, 1000);
    const show = (...lit) => {
        const cells = Array.from({ length: 1000 }, (_, block) => ({ ...cell(block), isLit: lit.includes(block) }));
        field.show(cells, { places: { a: 2 } }, null);
        const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d");
        copy.drawImage(canvas, 0, 0);
        return copy.getImageData(0, 0, canvas.width, canvas.height).data;
    };
    const [before, after, again] = [show(), show(17), show()], { x, y } = field.corner(17), changed = [];
    before.forEach((value, i) => {
        const pixel = Math.floor(i / 4), across = pixel % canvas.width - x, down = Math.floor(pixel / canvas.width) - y;
        if (value !== after[i]) changed.push(Math.min(across, down), Math.max(across, down));
    });
    holder.remove();
    const isSame = again.every((value, i) => value === before[i]);
    return [changed.length > 0, Math.min(...changed) >= -2, Math.max(...changed) <= field.size + 1, isSame];
}"""


@pytest.fixture(scope="module")
def chromium():
    with browser() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def front():
    args = EngineArgs(model=ROOT / "models" / "storyteller", device="cpu", **OPTIONS)
    with living(args, PLAIN_TEMPLATE, show_text=True) as front:
        yield front


class Chat(Reader):
    """A reader who chats."""

    def ask(self, text, n=1):
        """Send a message, without waiting for the answer."""
        self.page.locator(f"#samples input[value='{n}']").check(force=True)
        self.page.fill("#words", text)
        self.page.press("#words", "Enter")

    def say(self, text, n=1):
        """Send a message, and wait for the whole answer."""
        self.ask(text, n)
        self.wait()

    def wait(self):
        self.page.wait_for_selector("#send:text-is('Send')")

    def answers(self):
        """Return the texts of the last turn's answers."""
        return self.page.locator(".turn:last-child .text").evaluate_all("each => each.map(text => text.lastChild.data)")

    def facts(self):
        return self.text(".turn:last-child .facts").strip()

    def events(self, kind):
        """Return the engine's events of a kind."""
        return self.page.evaluate(EVENTS, kind)

    def last_end(self):
        """Return why the last request ended."""
        [seq] = [event["seq"] for event in self.events("arrive")][-1:]
        return until(lambda: [event["why"] for event in self.events("end") if event["seq"] == seq])[0]

    def prompt(self, text):
        """Return the prompt of the last request, which contains `text`, as the engine got it."""
        prompts = until(lambda: [each for event in self.events("arrive") if text in (each := "".join(event["texts"]))])
        return prompts[-1]


@pytest.fixture(scope="module")
def shared_reader(chromium, front):
    """One page for all tests. They need not clean up."""
    reader = Chat(chromium, f"{front.url}/")
    reader.page.wait_for_selector("#chat", state="visible")
    reader.page.wait_for_selector("#stage", state="visible")
    yield reader
    assert reader.messages == [] and all(url.startswith(front.url) or url == "data:," for url in reader.requests)
    reader.context.close()


@pytest.fixture
def reader(shared_reader, front):
    front.brake.allow(None)
    page = shared_reader.page
    page.set_viewport_size(WIDE)
    page.emulate_media(color_scheme="light")
    page.click("#new-chat")
    page.locator("#system").evaluate("each => { each.value = ''; }")
    page.fill("#most", "24")
    page.evaluate("() => { Page.at.block = null; Page.follow(); }")
    until(lambda: not front.memory()["running"])
    return shared_reader


def words(text):
    return text.split()


# The conversation


def test_second_turn_sends_the_history_and_shows_what_was_cached(front, reader):
    reader.say("Once upon a time there was a fox")
    [answer] = reader.answers()
    assert answer
    reader.say("And where did it live?")
    prompt = reader.prompt("where did it live")
    turns = f"User: Once upon a time there was a fox Assistant: {answer} User: And where did it live? Assistant:"
    assert words(prompt)[-len(words(turns)) :] == words(turns)
    arrival = reader.events("arrive")[-1]
    [admission] = [event for event in reader.events("admit") if event["seq"] == arrival["seq"]]
    num_cached = admission["num_computed_tokens"]
    assert num_cached >= 16 and num_cached % OPTIONS["block_size"] == 0
    until(lambda: any(event["seq"] == arrival["seq"] for event in reader.events("end")))
    num_tokens = sum(event["seq"] == arrival["seq"] for event in reader.events("token"))
    expected = f"{num_cached} of {len(arrival['tokens'])} prompt tokens cached, {num_tokens} tokens, "
    assert reader.facts().startswith(expected) and re.search(r"\d tokens/s", reader.facts())
    assert reader.page.locator(".turn").count() == 2
    until(lambda: reader.page.locator(".turn:last-child .tag").count() == 1)


def test_new_chat_forgets_the_history_and_returns_to_the_message(front, reader):
    reader.say("The king had two daughters")
    reader.page.click("#new-chat")
    assert reader.page.locator(".turn").count() == 0
    assert reader.page.evaluate("document.activeElement.id") == "words"
    reader.say("A little girl went into the wood")
    assert "daughters" not in reader.prompt("A little girl went into the wood")
    assert reader.page.locator(".turn").count() == 1


def test_new_chat_stops_the_turn_that_is_running(front, reader):
    reader.page.fill("#most", "900")
    front.brake.allow(4)
    reader.ask("The king had two sons")
    until(lambda: "cached" in reader.facts())
    reader.page.click("#new-chat")
    assert reader.text("#send") == "Send" and reader.page.locator(".turn").count() == 0
    front.brake.allow(None)
    until(lambda: not front.memory()["running"])
    assert reader.last_end() == "abort"
    assert reader.page.locator(".turn").count() == 0 and reader.text("#chat-news") == ""


@pytest.mark.parametrize("key", [None, "Escape"])
def test_stop_ends_the_request_and_keeps_what_was_said(key, front, reader):
    reader.page.fill("#most", "900")
    front.brake.allow(12)
    reader.ask("Tell me about a bear")
    until(lambda: reader.text("#send") == "Stop" and words("".join(reader.answers())))
    reader.press(key) if key else reader.page.click("#send")
    reader.wait()
    front.brake.allow(None)
    until(lambda: not front.memory()["running"])
    assert reader.last_end() == "abort"
    assert "stopped" in reader.facts() and "prompt tokens cached" in reader.facts()
    [answer] = reader.answers()
    reader.page.fill("#most", "4")
    reader.say("Go on with the bear")
    turns = f"Tell me about a bear Assistant: {answer} User: Go on with the bear"
    assert " ".join(words(turns)) in " ".join(words(reader.prompt("Go on with the bear")))


def test_chosen_sample_continues_the_conversation(front, reader):
    reader.say("Reddy Fox was very hungry", n=2)
    first, second = reader.answers()
    assert first != second
    reader.page.get_by_role("radio", name="continue with answer 2").check()
    assert reader.page.locator(".answer.chosen").count() == 1
    reader.say("What did he eat?")
    prompt = " ".join(words(reader.prompt("What did he eat?")))
    assert " ".join(words(second)) in prompt and " ".join(words(first)) not in prompt
    assert reader.page.locator(".turn fieldset:disabled").count() == 1  # the choice is part of the history now


def test_samples_share_blocks_since_the_fork(front, reader):
    front.brake.allow(6)
    reader.ask("Reddy Fox was very hungry, and he went into the Green Forest", n=3)
    until(lambda: "shared" in reader.facts())
    until(lambda: reader.page.locator("#grid .square.lit .count").count() > 0)
    counts = reader.page.locator("#grid .square.lit .count").all_inner_texts()
    assert set(counts) == {"3"} and f"{len(counts)} blocks shared" in reader.facts()
    labels = reader.page.locator(".turn:last-child .tag").all_inner_texts()
    assert [label[-1] for label in labels] == ["1", "2", "3"]
    front.brake.allow(None)
    reader.wait()


def test_system_prompt_reaches_the_engine(front, reader):
    reader.page.locator("#system-part:not([open]) summary").click()
    reader.page.fill("#system", "You are an owl.")
    reader.say("Who are you?")
    assert "System: You are an owl.\nUser: Who are you?" in reader.prompt("Who are you?")
    reader.page.click("#system-part summary")


def test_base_model_does_not_write_the_users_side(front, reader):
    with reader.page.expect_request("**/v1/chat/completions") as sent:
        reader.say("Hello")
    assert sent.value.post_data_json["stop"] == ["\nUser:", "\nSystem:", "\nAssistant:"]


def test_model_without_a_template_continues_the_text_alone(chromium, front):
    state = front.front.state
    model = state.model
    front.call(setattr, state, "model", replace(model, chat_template=None))
    reader = Chat(chromium, f"{front.url}/")
    page = reader.page
    page.wait_for_selector("#chat-note", state="visible")
    page.wait_for_selector("#stage", state="visible")
    front.call(setattr, state, "model", model)
    assert "no chat template" in reader.text("#chat-note") and page.is_hidden("#system")
    page.fill("#most", "8")
    reader.say("Once upon a time there was an owl")
    reader.say("Peter Rabbit ran")
    assert words(reader.prompt("Peter Rabbit ran"))[-3:] == ["Peter", "Rabbit", "ran"]
    assert "owl" not in reader.prompt("Peter Rabbit ran") and "User:" not in reader.prompt("Peter Rabbit ran")
    assert "prompt tokens cached" in reader.facts() and page.input_value("#words") == "Peter Rabbit ran"
    assert reader.messages == []
    reader.context.close()


def test_failed_turn_gives_the_message_back_and_is_no_history(front, reader):
    reader.ask("fox " * 3000)
    reader.wait()
    assert re.match(r"The request failed: .*\d+ tokens.*[^.]\.$", reader.facts())
    assert reader.page.input_value("#words") == "fox " * 3000
    assert all("status of 400" in line for line in reader.messages)
    reader.messages.clear()
    reader.say("A hen had three chickens")
    assert "fox" not in reader.prompt("A hen had three chickens")


def test_texts_are_never_markup(front, reader):
    reader.page.fill("#most", "1")
    reader.say("<img src=x onerror=alert(1)><b>bold</b>")
    assert reader.text(".turn .message").endswith("<img src=x onerror=alert(1)><b>bold</b>")
    assert reader.page.locator("#turns :is(img, b)").count() == 0


# The pool


def test_blocks_of_a_turn_light_up_while_it_runs(front, reader):
    front.brake.allow(0)
    other = threading.Thread(target=front.complete, kwargs={"prompt": "Meanwhile a wolf", "max_tokens": 40})
    other.start()
    reader.ask("Once there were a cat and a mouse", n=2)
    until(lambda: len(front.front.state.engine.running) == 2)
    front.brake.allow(12)
    until(lambda: "shared" in reader.facts())
    until(lambda: reader.page.evaluate(OWN, ["Meanwhile a wolf", "a cat and a mouse"])[0] == 3)
    lit, (_, own) = reader.page.evaluate(LIT), reader.page.evaluate(OWN, ["a cat and a mouse"])
    assert lit == own and not set(lit) & set(reader.page.evaluate(OWN, ["Meanwhile a wolf"])[1])
    assert "in your chat" in reader.square(lit[0]).get_attribute("aria-label")
    assert reader.page.locator("#running li.lit").count() == 2
    front.brake.allow(None)
    reader.wait()
    other.join()
    until(lambda: not front.memory()["running"] and reader.page.evaluate(LIT) == [])


def test_field_outlines_the_blocks_of_a_turn(reader):
    assert reader.page.evaluate(LIT_FIELD) == [True, True, True, True]


# Keyboard and screen readers


def test_enter_sends_and_shift_enter_starts_a_line(front, reader):
    reader.page.fill("#words", "One")
    reader.press("Shift+Enter")
    reader.page.keyboard.type("Two")
    assert reader.page.input_value("#words") == "One\nTwo" and reader.page.locator(".turn").count() == 0
    front.brake.allow(3)
    reader.press("Enter")
    until(lambda: reader.text("#send") == "Stop")
    reader.press("Enter")  # neither stops the turn nor sends another
    reader.page.press("#most", "Enter")
    assert reader.text("#send") == "Stop" and reader.page.locator(".turn").count() == 1
    front.brake.allow(None)
    reader.wait()
    assert reader.text(".turn .message").endswith("One\nTwo") and reader.page.input_value("#words") == ""


def test_empty_message_is_not_sent(front, reader):
    reader.page.fill("#words", " \n ")
    reader.press("Enter")
    assert reader.text("#send") == "Send" and reader.page.locator(".turn").count() == 0


def test_keys_in_the_chat_do_not_move_through_time(front, reader):
    reader.say("Two brothers", n=2)
    reader.page.get_by_role("radio", name="continue with answer 1").focus()
    reader.press("ArrowRight")
    assert reader.page.get_by_role("radio", name="continue with answer 2").is_checked()
    assert reader.page.is_hidden("#now")


def test_answer_is_announced_once_it_is_complete(front, reader):
    front.brake.allow(8)
    reader.ask("A miller had a donkey")
    until(lambda: words("".join(reader.answers())))
    assert reader.text("#chat-news") == "" and reader.page.get_attribute(".turn", "aria-busy") == "true"
    front.brake.allow(None)
    reader.wait()
    [answer] = reader.answers()
    news = reader.page.text_content("#chat-news")
    assert answer in news and reader.facts() in news
    assert reader.page.get_attribute(".turn", "aria-busy") == "false"
    assert reader.page.get_attribute("#chat-news", "role") == "status"
    assert reader.page.locator("#turns[aria-live], #turns [aria-live]").count() == 0


def test_all_controls_have_names_and_a_visible_focus(front, reader):
    reader.say("Three spinning women", n=2)
    reader.page.locator("#system-part:not([open]) summary").click()
    tree = reader.page.locator("#chat").aria_snapshot()
    textboxes = 'textbox "Message"', 'textbox "System prompt"'
    buttons = 'button "New chat"', 'button "Send"', 'spinbutton "Max tokens"', 'list "Conversation"'
    radios = 'group "Samples"', 'radio "1"', 'radio "4"', 'radio "continue with answer 2"'
    assert [name for name in (*textboxes, *buttons, *radios) if name not in tree] == []
    assert re.findall(r"- (?:textbox|button|radio|spinbutton)(?! \").*", tree) == []
    reader.page.focus("#new-chat")
    seen = []
    for _ in range(7):
        seen.append(
            reader.page.evaluate("""() => {
            const each = document.activeElement, shown = each.name === "n" ? each.nextElementSibling : each;
            return [each.id || each.name || each.tagName, getComputedStyle(shown).outlineStyle === "solid"];
        }""")
        )
        reader.press("Tab")
    names = [re.sub(r"choice-\d+", "choice", name) for name, _ in seen]
    assert names == ["new-chat", "SUMMARY", "system", "turns", "choice", "words", "n"]
    assert all(is_visible for name, is_visible in seen[1:]), seen
    reader.page.click("#system-part summary")


def test_chat_has_no_overflow_no_overlaps_and_enough_contrast(front, reader):
    page = reader.page
    reader.say("fox" * 120)
    reader.say("Tell me more of it", n=2)
    front.brake.allow(5)
    reader.ask("And then?", n=4)
    until(lambda: page.evaluate(LIT) and "shared" in reader.facts())
    page.evaluate(CHECKS.read_text(encoding="utf-8"))
    for scheme, viewport in itertools.product(PAPER, VIEWPORTS):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size(viewport)
        at = f"{scheme}, {viewport['width']} px"
        until(lambda scheme=scheme: page.evaluate(BACKGROUND) == PAPER[scheme])
        assert page.evaluate("Checks.overflow()") == 0, at
        assert page.evaluate("Page.byId('turns').scrollWidth - Page.byId('turns').clientWidth") == 0, at
        assert page.evaluate("Checks.overlaps()") == [], at
        assert page.evaluate("Checks.paleTexts()") == [], at
    front.brake.allow(None)
    reader.wait()


def test_nothing_blinks_for_readers_who_want_no_motion(front, reader):
    front.brake.allow(3)
    reader.ask("An old soldier")
    until(lambda: "cached" in reader.facts())
    blinking = "document.getAnimations().filter(each => each.animationName).length"
    until(lambda: reader.page.evaluate(blinking) == 1)
    reader.page.emulate_media(reduced_motion="reduce")
    until(lambda: reader.page.evaluate(blinking) == 0)
    reader.page.emulate_media(reduced_motion="no-preference")
    front.brake.allow(None)
    reader.wait()
