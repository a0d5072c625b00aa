"""The page plays an engine with a disk tier and drafts: it computes the states of the replay, and finds words."""

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.trace import traced
from nanovllm.trace.replay import begin, states
from notebooks.page.build import page
from stages.bench.speculation import edits_forced
from tests.browser import Reader, browser, skip_without_chromium
from tests.helpers import STORYTELLER
from tests.test_page_browser import as_json

skip_without_chromium()

TEXT = [*range(100, 127)]
OTHERS = [[*range(start, start + 35)] for start in (200, 300, 400)]
PLAY = """([snapshot, ...events]) => {
    const tape = new Page.Tape(snapshot);
    events.forEach(event => tape.add(event));
    const steps = Array.from({ length: tape.length }, (_, i) => i + 1);
    const frames = steps.map(step => tape.frameAt(step));
    const words = steps.map((step, i) => Page.stepSentence(tape.eventsOf(step), tape.eventsOf(step - 1), frames[i]));
    const facts = Page.deviceCells(frames.at(-1), []).map(cell => {
        Page.showPanel({ tape, sources: {} }, tape.length, cell.block, cell);
        return [cell.hash, document.querySelector("#panel .facts").textContent];
    });
    const on_disk = Object.keys(frames.at(-1).memory.on_disk);
    return { states: frames.map(({ state }) => state), words, facts, on_disk };
}"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the events of an engine, and its folder: texts are evicted, read, damaged and guessed."""
    folder, events = tmp_path_factory.mktemp("disk"), []
    folder.chmod(0o700)
    speculation = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    room = {"block_size": 4, "kv_cache_tokens": 48, "kv_offloading_tokens": 0, "watermark": 0.0, "max_model_len": 48}
    tiers = {"kv_disk_dir": str(folder), "offload_policy": "load", "speculative_config": speculation}
    llm = LLM(str(STORYTELLER), device="cpu", dtype="float32", attention_backend="torch", **room, **tiers)
    tier = llm.llm_engine.disk_tier

    def ask(prompt, max_tokens=1):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        llm.llm_engine.kv_cache_manager.check_integrity()
        tier.flush()

    with traced(llm, events.append), edits_forced(llm, 5):
        for prompt in (TEXT, OTHERS[0], TEXT, OTHERS[1]):
            ask(prompt, max_tokens=12)
        hashes = [event["hash"] for event in events if event["kind"] == "disk_stored"]
        path = next(folder.glob(f"*/*/{hashes[2]}.kv"))
        path.write_bytes(path.read_bytes()[:-1])
        for prompt in (TEXT, OTHERS[2], OTHERS[2]):  # the last one reports what the writer has done
            ask(prompt, max_tokens=2)
    return events, folder


@pytest.fixture(scope="module")
def played(run, tmp_path_factory):
    """Return what an empty page makes of the events."""
    path = tmp_path_factory.mktemp("page") / "empty.html"
    path.write_text(page(None), encoding="utf-8")
    with browser() as chromium:
        reader = Reader(chromium, path.as_uri())
        return reader.page.evaluate(PLAY, run[0])


def test_run_has_the_events_of_both_ideas(run):
    kinds = {(event["kind"], event.get("why")) for event in run[0]}
    assert {"disk_stored", "disk_loaded", "disk_arrived", "disk_bad", "lost"} <= {kind for kind, _ in kinds}
    assert {("given_back", "draft"), ("preempt", "lost"), ("draft_accepted", None)} <= kinds
    assert any(event["num_tokens"] for event in run[0] if event["kind"] == "draft_accepted")


@pytest.mark.full
def test_page_computes_the_states_of_the_replay(run, played):
    events = run[0]
    assert begin(events[0]).step == 0
    for shown, state in zip(played["states"], states(events), strict=True):
        assert shown == as_json(state), f"step {state.step}"


def test_page_knows_the_blocks_on_disk(run, played):
    _, folder = run
    assert {*played["on_disk"]} == {path.stem for path in folder.glob("*/*/*.kv")}
    for block_hash, facts in played["facts"]:
        assert ("disk has a copy" in facts) == (block_hash in played["on_disk"])


def test_sentences_tell_what_happened(played):
    words = " ".join(played["words"])
    for phrase in ("written to the disk", "the disk has", "read from the disk", "lost on its way", "guesses for"):
        assert phrase in words, f"{phrase!r} is in no sentence: {words}"
