"""Traces of the package's own engine, trace files, the option --trace and the command nanovllm trace."""

import json
import os
import resource
import signal
import threading
from collections import Counter

import pytest

from .. import LLM, BeamSearchParams, SamplingParams
from ..__main__ import main
from ..trace import read_trace, states, traced
from ..trace import replay as replaying
from ..trace.chrome import convert
from ..trace.events import COMMON_KEYS, KEYS, WITHOUT_BY, FileSink
from .soak.history import play_traced
from .soak.run import history_plan
from .testing.engines import OPTIONS
from .testing.processes import start
from .testing.trace import documented_whys

PROMPTS = ["the fox", "Once upon a time", "the fox", "the rabbit and the wood"]
FOUR = ("--max-tokens", "4", "--ignore-eos")


@pytest.fixture(scope="module")
def llm(checkpoint):
    """Return an engine with 12 blocks of 4, where requests wait, hit and are preempted."""
    return LLM(checkpoint, kv_cache_tokens=48, block_size=4, kv_offloading_tokens=64, **OPTIONS)


@pytest.fixture
def events(llm):
    """Return the events of four requests, one of which has three samples."""
    events = []
    params = [SamplingParams(n=1 + 2 * (i == 1), max_tokens=14, seed=i, ignore_eos=True, logprobs=1) for i in range(4)]
    llm.reset_prefix_cache()
    with traced(llm, events.append):
        llm.generate(PROMPTS, params)
    return events


def test_package_is_traced_like_any_stage(llm, events):
    assert events[0]["stage"] == "nanovllm"
    kinds = Counter(event["kind"] for event in events)
    assert kinds["arrive"] == kinds["end"] == 6 and kinds["token"] == 6 * 14 and kinds["forked"] == 2
    assert kinds["preempt"] and kinds["hit"] and kinds["copied"] and kinds["stored"]
    names = {event["seq"] for event in events if event["kind"] == "arrive"}
    assert {name.partition(".")[2] for name in names} == {"", "0", "1", "2"}


def test_replay_ends_in_the_same_state(llm, events):
    *_, state = states(events)
    pool = llm.llm_engine.kv_cache_manager.pool
    assert not state.sequences and not state.running and not state.waiting and sum(state.ref_counts) == 0
    assert state.free == list(pool.free) and {*state.cached.values()} == {each.hex() for each in pool.cached}


def test_preemption_says_whether_the_cache_was_reset_or_a_step_failed(checkpoint, monkeypatch):
    engine = LLM(checkpoint, kv_cache_tokens=48, block_size=4, **OPTIONS).llm_engine
    events = []
    with traced(engine, events.append):
        engine.add_request("a", [5, 6], SamplingParams(max_tokens=9, ignore_eos=True))
        engine.step()
        engine.reset_prefix_cache(reset_running_requests=True)
        engine.step()
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(engine.scheduler, "schedule", lambda: 1 / 0)
            engine.step()
        engine.abort_request("a")
    preempted = [(event["why"], event["for"]) for event in events if event["kind"] == "preempt"]
    assert preempted == [("reset", None), ("step failed", None)]


def test_sequence_that_waits_beside_a_failed_one_waits_for_the_budget(checkpoint):
    """Request a outgrows the pool and b takes all tokens of the step, so c is not considered."""
    engine = LLM(checkpoint, kv_cache_tokens=16, block_size=4, max_num_batched_tokens=4, **OPTIONS).llm_engine
    events = []
    with traced(engine, events.append):
        engine.add_request("a", [5] * 16, SamplingParams(max_tokens=9, ignore_eos=True))
        for name in "bc":
            engine.add_request(name, [6] * 8, SamplingParams(max_tokens=1))
        while "a" in engine.requests:
            engine.step()
        engine.abort_request(["b", "c"])
    last = [event for event in events if event["kind"] == "held_up"][-1]
    assert [last[key] for key in ("seq", "why", "needed", "free")] == ["c", "budget", 8, 0]


def test_beam_search_is_a_series_of_steps(llm):
    events = []
    with traced(llm, events.append):
        [output] = llm.beam_search("the fox", BeamSearchParams(3, max_tokens=5, ignore_eos=True))
    assert len(output.outputs) == 3
    kinds = Counter(event["kind"] for event in events)
    assert kinds["step"] == 5 and kinds["arrive"] == kinds["end"] and kinds["shared"]
    assert {event["why"] for event in events if event["kind"] == "end"} == {"beam"}
    *_, state = states(events)
    assert not state.sequences and sum(state.ref_counts) == 0


def test_ctrl_c_takes_effect_between_steps(llm):
    """Press it during the first event of the third step: that step is traced to its end."""
    events, steps = [], []

    def sink(event):
        events.append(event)
        if event["step"] == 3 and steps[-1:] != [3]:
            signal.raise_signal(signal.SIGINT)
        steps.append(event["step"])

    engine = llm.llm_engine
    with traced(llm, sink):
        engine.add_request("a", "the fox", SamplingParams(max_tokens=9, ignore_eos=True))
        with pytest.raises(KeyboardInterrupt):
            while True:
                engine.step()
        assert events[-1]["kind"] == "step" and events[-1]["step"] == 3 and events[-1]["error"] is None
        engine.abort_request("a")
    assert [event["kind"] for event in events[-6:] if event["kind"] in ("abort", "end")] == ["abort", "end"]


def test_tracing_works_in_another_thread(checkpoint):
    events = []

    def serve():
        llm = LLM(checkpoint, **OPTIONS)  # the engine belongs to the thread that builds it
        with traced(llm, events.append):
            llm.generate("the fox", SamplingParams(max_tokens=2, ignore_eos=True))

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert [event["kind"] for event in events].count("step") == 2


# Random histories


@pytest.mark.filterwarnings("ignore:.* requests were not served")
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.full) for part in range(1, 4))])
def test_replay_of_random_histories_equals_the_engine(part):
    """Histories have requests, aborts, resets, beam searches and faults; a third is traced from the middle on."""
    kinds, whys = Counter(), Counter()
    for i in range(6):
        for event in play_traced(history_plan(2, part * 10 + i), num_before=i % 3 * 10):
            kinds[event["kind"]] += 1
            expected = {*KEYS[event["kind"]], *COMMON_KEYS} - ({"by"} if event["kind"] in WITHOUT_BY else set())
            assert {*event} == expected
            if "why" in event and event["kind"] != "refused":
                whys[event["kind"], event["why"]] += 1
    assert kinds["step"] > 300 and kinds["pools"] and kinds["preempt"], "this test covers too little"
    assert {*kinds} <= {*KEYS} - {"reserved", "released"}
    assert {*whys} <= documented_whys()


@pytest.mark.filterwarnings("ignore:.* requests were not served")
def test_wrong_event_is_noticed(monkeypatch):
    """With one token too many in the replayed state, the comparison fails."""

    def twice(state, seq, event):
        change_sequence(state, seq, event)
        if event["kind"] == "token":
            change_sequence(state, seq, event)

    change_sequence = replaying.change_sequence
    monkeypatch.setattr(replaying, "change_sequence", twice)
    with pytest.raises(AssertionError):
        play_traced(history_plan(2, 0))


def test_engine_is_traced_once_at_a_time(llm):
    events = []
    with traced(llm, events.append), pytest.raises(ValueError, match="traced already"), traced(llm, print):
        pass
    assert [event["kind"] for event in events] == ["snapshot"]


def test_trace_leaves_nothing_in_the_engine(llm):
    before = list(llm.llm_engine.observers)
    with traced(llm, lambda event: None):
        assert len(list(llm.llm_engine.observers)) == len(before) + 1
    assert list(llm.llm_engine.observers) == before


# Files


def test_file_holds_all_events(events, tmp_path):
    with FileSink(tmp_path / "run.jsonl") as sink:
        for event in events:
            sink(event)
    assert list(read_trace(tmp_path / "run.jsonl")) == events


def test_full_disk_never_leaves_a_partial_line(llm, tmp_path):
    """Like a full disk, the file accepts only a part of the write."""
    file, soft_and_hard = tmp_path / "run.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    outputs = None
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, soft_and_hard[1]))
        with pytest.raises(OSError, match="File too large"), traced(llm, file):
            outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=25, ignore_eos=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft_and_hard)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [25] * 4
    assert file.read_bytes().endswith(b"}\n") and 6000 < os.path.getsize(file) < 9000
    assert len(list(states(read_trace(file)))) > 1


def test_only_an_old_trace_is_replaced(llm, tmp_path):
    file = tmp_path / "run.jsonl"
    for _ in range(2):
        with traced(llm, file):
            llm.generate("the fox", SamplingParams(max_tokens=2))
        assert [event["kind"] for event in read_trace(file)].count("snapshot") == 1
    file.write_text("my notes\n")
    with pytest.raises(ValueError, match=r"run.jsonl exists and is not a trace"), traced(llm, file):
        pass
    assert file.read_text() == "my notes\n"
    with pytest.raises(ValueError, match=r"llm must be .*, got str"), traced("llm", tmp_path / "new.jsonl"):
        pass
    assert not (tmp_path / "new.jsonl").exists()


def test_partial_last_line_is_skipped(events, tmp_path):
    text = "".join(json.dumps(event) + "\n" for event in events)
    (tmp_path / "cut.jsonl").write_text(text[:-20])
    assert list(read_trace(tmp_path / "cut.jsonl")) == events[:-1]


SNAPSHOT = '{"kind": "snapshot", "step": 0, "version": 2, "stage": "s1", "pool": {}, "host": null, "state": {}, '
SNAPSHOT += '"max_num_seqs": 1, "max_num_batched_tokens": null}\n'


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "has no complete line"),
        ('{"kind":"snapshot"', "has no complete line"),
        ("[" * 100_000 + "\n", "line 1: not JSON: maximum recursion depth"),
        ("\udcff\n", "line 1: not JSON: Expecting value"),
        ("hello\n", "line 1: not JSON: Expecting value"),
        ('["kind"]\n', "line 1: not a trace event"),
        ('{"kind": "brew"}\n', "line 1: not a trace event"),
        ('{"kind": "step", "step": 1, "began": 0, "seconds": 0, "error": null}\n', "exactly one snapshot"),
        (SNAPSHOT + SNAPSHOT, "line 2: a trace needs exactly one snapshot"),
        (SNAPSHOT.replace('"version": 2', '"version": 1'), "must be a trace of version 2, got version 1"),
        (SNAPSHOT + '{"kind": "free", "step": 1, "place": "front"}\n', "line 2: free needs the key block"),
    ],
)
def test_invalid_trace_is_one_clear_error(text, error, tmp_path, capsys):
    file = tmp_path / "run.jsonl"
    file.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=error):
        list(read_trace(file))
    assert main(["trace", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and error in err and err.count("\n") == 1


# The commands


def test_generate_writes_a_trace(run, tmp_path):
    file = tmp_path / "run.jsonl"
    status, out, err = run("generate", "the fox", "the wood", *FOUR, "--trace", str(file))
    assert (status, err) == (0, "") and "tokens/s" in out
    assert [event["kind"] for event in read_trace(file)].count("token") == 8


def test_batch_writes_a_trace(run, tmp_path):
    requests, file = tmp_path / "requests.jsonl", tmp_path / "run.jsonl"
    requests.write_text('{"prompt": "the fox", "id": "a"}\n{"prompt": "the wood", "id": "b", "n": 2}\n')
    status, out, _ = run("batch", str(requests), *FOUR, "--trace", str(file))
    assert status == 0 and out.count("\n") == 2
    assert {event["seq"] for event in read_trace(file) if event["kind"] == "end"} == {"a", "b.0", "b.1"}
    status, out, err = run("batch", str(requests), *FOUR, "--trace", str(requests))
    assert (status, out) == (2, "") and "requests.jsonl exists and is not a trace" in err
    both = str(tmp_path / "both.jsonl")
    status, _, err = run("batch", str(requests), *FOUR, "--output", both, "--trace", both)
    assert status == 2 and "the trace" in err


@pytest.mark.parametrize("command", ["generate", "batch"])
def test_full_disk_ends_the_trace_but_not_the_run(command, run, tmp_path):
    (tmp_path / "requests.jsonl").write_text('{"prompt": "the fox"}\n')
    what = "the fox" if command == "generate" else str(tmp_path / "requests.jsonl")
    plain = run(command, what, *FOUR, "--temperature", "0")
    status, out, err = run(command, what, *FOUR, "--temperature", "0", "--trace", "/dev/full")
    assert status == 1 and "error: [Errno 28] No space left on device\n" in err
    lines = 1 + (command == "batch")  # batch prints its own summary there
    assert err.count("\n") == lines and len(out.splitlines()) == len(plain[1].splitlines())
    assert out.splitlines()[0].partition('"ttft"')[0] == plain[1].splitlines()[0].partition('"ttft"')[0]


def test_file_that_cannot_be_written_is_an_error_before_anything_is_computed(run, tmp_path):
    status, out, err = run("generate", "the fox", *FOUR, "--trace", str(tmp_path / "no" / "run.jsonl"))
    assert (status, out) == (2, "") and "No such file or directory" in err and err.count("\n") == 1


def test_command_summarizes_and_converts(events, tmp_path, capsys):
    file, chrome = tmp_path / "run.jsonl", tmp_path / "run.json"
    with FileSink(file) as sink:
        for event in events:
            sink(event)
    assert main(["trace", str(file), "--chrome", str(chrome)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("nanovllm: steps ") and ", sequences 6, tokens 84, preemptions " in out and err == ""
    assert json.loads(chrome.read_text()) == convert(events)
    assert main(["trace", str(file), "--chrome", str(chrome)]) == 2
    assert "File exists" in capsys.readouterr().err and json.loads(chrome.read_text()) == convert(events)


def test_trace_with_missing_events_is_one_clear_error(events, tmp_path, capsys):
    file, chrome = tmp_path / "run.jsonl", tmp_path / "run.json"
    kept = [event for event in events if event["kind"] != "arrive"]
    file.write_text("".join(json.dumps(event) + "\n" for event in kept))
    assert main(["trace", str(file), "--chrome", str(chrome)]) == 2
    err = capsys.readouterr().err
    assert "run.jsonl: events are missing or changed" in err and err.count("\n") == 1 and not chrome.exists()


def test_command_does_not_import_torch(events, tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')")
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    process = start("trace", str(tmp_path / "run.jsonl"), "--chrome", str(tmp_path / "run.json"), path=tmp_path)
    out, err = process.communicate(timeout=60)
    assert err == "" and out.startswith("nanovllm: steps ")
