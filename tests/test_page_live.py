"""The page of a server in a real browser, while requests run: it shows the engine's memory."""

import re
import threading
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from nanovllm.options.engine_args import EngineArgs
from tests.browser import NARROW, PAPER, WIDE, Reader, browser, skip_without_chromium
from tests.helpers import ROOT, full
from tests.live import living, until

skip_without_chromium()
CHECKS = Path(__file__).with_name("page_checks.js")
OPTIONS = {"block_size": 8, "kv_cache_tokens": 512, "max_num_seqs": 6, "enforce_eager": True, "kv_offloading_tokens": 0}
STATE = "Page.runs[0].tape.frameAt(Page.lastStep()).state"
BLOCKS_OF_LONG_NAMES = """() => {
    const places = { request: 26 + 22 * 26 + 22, stranger: 0 }, band = seq => ({ seq, from: 0, to: 8, filled: 5 });
    const cell = (block, ...seqs) =>
        ({ block, status: "held", count: seqs.length, bands: seqs.map(band), origin: null, isTouched: false });
    const cells = [cell(0, "request.0"), cell(1, "request.0", "request.1"), cell(2, "request.0", "stranger")];
    const makeTier = num_squares => {
        const { make } = Page, grid = make("div"), holder = make("div", { class: "grid-holder" }, grid, make("canvas"));
        Page.byId("pool").append(holder);
        const tier = new Page.Tier(grid, holder.lastChild, "block", () => {});
        tier.shape(num_squares, "block", 128);
        tier.show(cells, { places }, null);
        return [holder, grid.querySelectorAll(".square")];
    };
    const [[device, squares], [host, hostSquares]] = [makeTier(128), makeTier(40)], faults = [], texts = [];
    const box = part => part.getBoundingClientRect(), range = document.createRange();
    for (const square of [...squares].slice(0, cells.length)) {
        const [letter, count] = [square.querySelector(".letter"), square.querySelector(".count")];
        range.selectNodeContents(letter);
        const [text, whole, name] = [box(range), box(square), letter.textContent];
        texts.push(name);
        if (text.left < whole.left || text.right > whole.right) faults.push(`${name} is cut off: ${whole.width} px`);
        if (count && box(count).top < box(letter).bottom - 0.5) faults.push(`the count overlaps ${name}`);
    }
    if (box(squares[0]).width !== box(hostSquares[0]).width) faults.push("host squares have another size");
    device.remove();
    host.remove();
    return [texts, faults];
}"""
FIELD = """() => {
    const cell = (block, filled) => (filled === null
        ? { block, status: "free", count: 0, bands: [], origin: null, isTouched: false }
        : { block, status: "held", count: 1, bands: [{ seq: "a", from: 0, to: 8, filled }], origin: null,
            isTouched: filled === 8 });
    const cells = filled => Array.from({ length: 10000 }, (_, block) => cell(block, filled(block)));
    const before = cells(block => (block < 300 ? block % 9 : null)), memory = { places: { a: 2 } };
    const after = cells(block => (block === 7 ? 3 : block === 299 ? null : block < 300 ? block % 9 : null));
    const shown = (...states) => {
        const canvas = Page.make("canvas"), holder = Page.make("div", {}, canvas);
        const field = new Page.Field(canvas, "block");
        Page.byId("pool").append(holder);
        field.shape(10000, 10000);
        let count = 0;
        const { fillRect } = CanvasRenderingContext2D.prototype;
        for (const state of states) {
            count = 0;
            CanvasRenderingContext2D.prototype.fillRect = function (...box) { count += 1; fillRect.apply(this, box); };
            field.show(state, memory, states.length === 1 ? null : state === after ? null : 5);
            CanvasRenderingContext2D.prototype.fillRect = fillRect;
        }
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        holder.remove();
        return [count, data];
    };
    const [all, expected] = shown(after), [few, pixels] = shown(before, after);
    return [all, few, pixels.length === expected.length && pixels.every((value, i) => value === expected[i])];
}"""
FULL_POOL = """() => {
    const all = make => Object.fromEntries(Array.from({ length: 10000 }, (_, block) => [block, make(block)]));
    const state = { sequences: [], waiting: [], running: [], ref_counts: Object.values(all(() => 0)),
        free: Object.values(all(block => block)), cached: all(block => `h${block}`), loading: {},
        host_ref_counts: [], host_free: [], host_cached: {} };
    const pool = { unit: "blocks", num_blocks: 10000, block_size: 4 };
    const tape = new Page.Tape({ kind: "snapshot", step: 0, stage: "live", pool, host: null, state });
    for (let block = 0; block < 200; block += 1) {
        tape.add({ kind: "evicted", block });
        tape.add({ kind: "cached", block, hash: `new${block}` });
        if (block % 10 === 9) tape.add({ kind: "step", step: (block + 1) / 10 });
    }
    const time = work => {
        const began = Page.now(), done = work();
        return [Page.now() - began, JSON.stringify(done.state)];
    };
    const begun = tape.frameAt(0), before = JSON.stringify(begun.state);
    const [ofAll, shown] = time(() => tape.frameAt(tape.length));
    const [ofEach, expected] = time(() => tape.eventsBetween(0, tape.length).reduce(Page.advance, begun));
    return [ofEach / ofAll, shown === expected, before === JSON.stringify(tape.frameAt(0).state)];
}"""
SHOWN = """expected => {
    const { tape } = Page.runs[0], first = Math.max(tape.first, tape.length - 400);
    for (let step = tape.length; step >= first; step -= 1) {
        const { state } = tape.frameAt(step), seqs = state.running.map(seq => state.sequences[seq]);
        const running = seqs.map(({ block_table, num_computed_tokens }) => [block_table, num_computed_tokens]);
        const cached = Object.fromEntries(Object.keys(state.cached).map(key => [key, true]));
        const shown = { ...state, running, cached, waiting: state.waiting.length };
        const isSame = key => JSON.stringify(shown[key]) === JSON.stringify(expected[key]);
        if (Object.keys(expected).every(isSame)) return step;
    }
    return null;
}"""


@pytest.fixture(scope="module")
def chromium():
    with browser() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def front():
    args = EngineArgs(model=ROOT / "models" / "storyteller", device="cpu", **OPTIONS)
    with living(args, show_text=True) as front:
        yield front


@pytest.fixture(scope="module")
def shared_reader(chromium, front):
    """One page for all tests. They need not clean up."""
    reader = Reader(chromium, f"{front.url}/")
    reader.page.wait_for_selector("#stage", state="visible")
    yield reader
    assert reader.messages == [] and all(url.startswith(front.url) or url == "data:," for url in reader.requests)
    reader.context.close()


@pytest.fixture
def reader(shared_reader):
    shared_reader.page.set_viewport_size(WIDE)
    shared_reader.page.emulate_media(color_scheme="light")
    shared_reader.page.evaluate("() => { document.activeElement.blur(); Page.at.block = null; Page.follow(); }")
    return shared_reader


@pytest.fixture
def busy(front):
    """Send requests that come and go while a test runs."""
    is_over = threading.Event()

    def run(number):
        while not is_over.is_set():
            texts = ["Once upon a time there was a King who had three daughters", "Reddy Fox was very hungry"]
            options = {"prompt": texts[number % 2], "temperature": 0.8, "n": 1 + number % 2, "ignore_eos": True}
            front.complete(**options, max_tokens=20 + 5 * number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    yield
    is_over.set()
    for thread in threads:
        thread.join()


def steps_shown(reader):
    return reader.page.evaluate("Page.lastStep()")


@pytest.mark.full
def test_page_shows_the_engines_blocks_while_requests_run(front, reader, busy):
    for _ in range(3):
        expected = until(lambda: (memory := front.memory())["running"] and memory)
        assert expected.pop("is_watched")
        del expected["waiting"]  # a request that came since the last step is on the page after the next one
        until(lambda expected=expected: reader.page.evaluate(SHOWN, expected) is not None)
    held = "document.querySelectorAll('#grid .square.held').length"
    reader.press(" ")  # pause, so that the grid and the state belong to the same step
    counts = reader.page.evaluate("Page.runs[0].tape.frameAt(Page.at.step).state.ref_counts")
    until(lambda: reader.page.evaluate(held) == sum(count > 0 for count in counts) > 0)


@pytest.mark.full
def test_page_shows_the_cache_when_no_request_runs(front, reader):
    front.complete(max_tokens=30)
    expected = until(lambda: (memory := front.memory()) and not memory["running"] and memory)
    assert expected.pop("is_watched")
    assert until(lambda: reader.page.evaluate(SHOWN, expected) is not None) and expected["cached"]
    until(lambda: reader.page.locator("#grid .square.held").count() == 0)
    until(lambda: reader.text("#sentence").startswith("No requests are running"))


@pytest.mark.full
def test_block_that_the_reader_selects_stays_selected(front, reader):
    reader.page.evaluate("Page.choose(0)")
    front.complete(prompt="The king", n=6, max_tokens=90, ignore_eos=True)
    shown = steps_shown(reader)
    front.complete(max_tokens=2)
    until(lambda: steps_shown(reader) > shown)
    assert reader.text("#panel").startswith("Block 0")


@pytest.mark.full
def test_lead_names_the_block_size(reader):
    assert f"a block of memory for {OPTIONS['block_size']} tokens" in reader.text("#lead")


@pytest.mark.full
@pytest.mark.parametrize("viewport", [WIDE, NARROW])
def test_labels_fit_into_the_squares_of_a_pool_of_128_blocks(viewport, reader):
    reader.page.set_viewport_size(viewport)
    assert reader.page.evaluate(BLOCKS_OF_LONG_NAMES) == [["WW1", "WW", "WW1+"], []]


@pytest.mark.nightly
def test_lists_of_10000_blocks_are_not_copied_at_each_event(reader):
    times_faster, is_same, is_kept = reader.page.evaluate(FULL_POOL)
    assert times_faster > 5 and is_same and is_kept


@pytest.mark.full
def test_field_paints_only_squares_that_changed(reader):
    num_all, num_changed, is_same = reader.page.evaluate(FIELD)
    assert num_all > 10_000 and num_changed < 10 and is_same


@pytest.mark.full
def test_reader_can_look_back_and_go_live_again(front, reader, busy):
    until(lambda: steps_shown(reader) > 40)
    reader.page.focus("#play")
    reader.press("ArrowLeft")
    step, length = reader.step, steps_shown(reader)
    until(lambda: steps_shown(reader) > length + 5)
    assert reader.step == step and re.fullmatch(r"\d+ s ago: go live", reader.text("#now"))
    reader.page.locator("#slider").fill(str(step - 30))
    assert reader.step == step - 30
    reader.press("ArrowRight")
    assert reader.step == step - 29 and reader.text("#sentence")
    reader.page.click("#now")
    assert not reader.page.is_visible("#now")
    until(lambda: reader.step > length + 5)


@pytest.mark.full
def test_two_pages_can_watch_and_leave(chromium, front):
    num_others = len(front.feed.viewers)  # the page of the other tests
    readers = [Reader(chromium, f"{front.url}/") for _ in range(2)]
    for reader in readers:
        reader.page.wait_for_selector("#stage", state="visible")
    assert len(front.feed.viewers) == num_others + 2 and front.memory()["is_watched"]
    front.complete(max_tokens=20)
    expected = front.memory()
    assert expected.pop("is_watched")
    for reader in readers:
        until(lambda reader=reader: reader.page.evaluate(SHOWN, expected) is not None)
        reader.context.close()
    until(lambda: len(front.feed.viewers) == num_others)


@pytest.mark.full
def test_lost_connection_continues_the_run(front, reader):
    front.complete(max_tokens=20)
    until(lambda: steps_shown(reader) > 10)
    before = steps_shown(reader)
    feed = front.feed
    front.call(feed.close)
    until(lambda: "trying again" in reader.text("#status") and not feed.viewers)
    front.complete(max_tokens=20, prompt="Meanwhile")
    front.call(setattr, feed, "is_closed", False)
    until(lambda: reader.text("#status") == "Live")
    expected = front.memory()
    del expected["is_watched"]
    until(lambda: reader.page.evaluate(SHOWN, expected) is not None)
    assert steps_shown(reader) > before and reader.page.evaluate("Page.runs.length") == 1


@pytest.mark.full
def test_restarted_server_begins_a_new_run(front, reader):
    front.complete(max_tokens=2)
    until(lambda: reader.page.locator("#done .tag").count())
    feed = front.feed
    front.call(setattr, feed, "run", "another")
    front.call(feed.close)
    until(lambda: "trying again" in reader.text("#status") and not feed.viewers)
    front.call(setattr, feed, "is_closed", False)
    until(lambda: reader.text("#status") == "Live" and not reader.page.locator("#done .tag").count())
    front.complete(max_tokens=2)
    until(lambda: reader.page.locator("#done .tag").count() == 1)


@pytest.mark.full
def test_content_security_policy_blocks_inline_scripts(front, reader):
    policy = reader.page.evaluate("fetch('/').then(response => response.headers.get('content-security-policy'))")
    assert "default-src 'none'" in policy and "unsafe" not in policy
    reader.page.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "window.hasRun = true";
        document.body.append(script);
    }""")
    assert reader.page.evaluate("window.hasRun") is None and "Content Security Policy" in reader.messages[-1]
    reader.messages.clear()


@pytest.mark.full
@pytest.mark.parametrize(
    "viewport, scheme", [full(WIDE, "light"), (NARROW, "dark"), full(NARROW, "light"), full(WIDE, "dark")]
)
def test_live_page_has_no_overlaps_and_enough_contrast(viewport, scheme, front, reader, busy):
    reader.page.set_viewport_size(viewport)
    reader.page.emulate_media(color_scheme=scheme)
    until(lambda: reader.page.locator("#running .tag").count() > 2)
    reader.press(" ")
    reader.page.evaluate(CHECKS.read_text(encoding="utf-8"))
    assert reader.page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == PAPER[scheme]
    assert reader.page.evaluate("Checks.overflow()") == 0
    assert reader.page.evaluate("Checks.overlaps()") == []
    assert reader.page.evaluate("Checks.paleTexts()") == []


@pytest.mark.full
def test_engine_is_not_traced_after_the_last_page_is_closed(chromium, front, shared_reader):
    shared_reader.page.goto("about:blank")
    until(lambda: not front.memory()["is_watched"])
    assert not front.feed.viewers
    shared_reader.open(f"{front.url}/")
    until(lambda: front.memory()["is_watched"])


@pytest.mark.full
def test_page_asks_for_the_api_key_again_after_a_wrong_one(chromium):
    args = EngineArgs(model=ROOT / "models" / "storyteller", device="cpu", **OPTIONS)
    with living(args, api_keys=("sesame",)) as front:
        reader = Reader(chromium, f"{front.url}/")
        page = reader.page
        page.wait_for_selector("#key-form", state="visible")
        assert page.title() == "The pool, live" and page.is_hidden("#no-data") and not page.text_content("#speed")
        assert "--api-key" in page.text_content("#key-hint")
        for key, shown in (("barley", "#key-hint:has-text('not valid')"), ("sesame", "#stage")):
            page.fill("#key", key)
            page.click("#key-form button")
            page.wait_for_selector(shown, state="visible")
        assert page.is_hidden("#key-form")
        page.fill("#most", "4")
        page.press("#words", "Enter")
        page.wait_for_selector(".turn .facts:has-text('prompt tokens cached, 4 tokens')")
        reader.context.close()


@pytest.mark.full
def test_page_works_at_the_path_of_a_proxy(chromium):
    """The address has no slash at its end, which relative links would need."""
    args = EngineArgs(model=ROOT / "models" / "storyteller", device="cpu", **OPTIONS)
    with living(args, root_path="/team") as front:
        reader = Reader(chromium, f"{front.url}/team")
        reader.page.wait_for_selector("#stage", state="visible")
        reader.page.fill("#most", "4")
        reader.page.press("#words", "Enter")
        reader.page.wait_for_selector(".turn .facts:has-text('prompt tokens cached, 4 tokens')")
        assert reader.messages == []
        own = [url for url in reader.requests if url != "data:,"]
        assert len(own) > 3 and all(url.startswith(f"{front.url}/team") for url in own)
        reader.context.close()
