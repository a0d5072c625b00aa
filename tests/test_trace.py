"""The trace of every stage: its replay gives the engine's state after each step. The package has its own test."""

import ast
import random
import re
from collections import Counter
from functools import cache

import pytest

import stages.__main__ as launcher
from nanovllm.tests.testing.trace import documented_whys
from nanovllm.trace import Tracer, read_trace, states, traced
from nanovllm.trace import replay as replaying
from nanovllm.trace.chrome import convert
from nanovllm.trace.events import COMMON_KEYS, KEYS, WITHOUT_BY
from tests.chrome_format import check_format
from tests.helpers import PACKAGE, ROOT, STORYTELLER, find_stages, folder_of, full
from tests.history import play_traced
from tests.plans import Drain, EngineOptions, Plan, Request, random_plan
from tests.scripted_llm import Stage
from tests.soak import history_plan

STAGES = [Stage(name) for name in find_stages(ROOT)]
EVENTS = (ROOT / PACKAGE / "trace" / "EVENTS.md").read_text()
ONLY_FIRST = {"reserved", "released"}
FIRST = {  # the first stage that has a kind of event; the other kinds occur in all
    "taken": 2,
    "given_back": 2,
    "free": 2,
    "preempt": 4,
    "abort": 4,
    "shared": 5,
    "copied": 5,
    "forked": 5,
    "hit": 6,
    "idle": 6,
    "cached": 6,
    "evicted": 6,
    "stored": 7,
    "renewed": 7,
    "host_evicted": 7,
    "loaded": 7,
    "arrived": 7,
    "raised": 8,  # only the package, which continues after an error
    "draft_proposed": 8,
    "draft_accepted": 8,
    **dict.fromkeys(("disk_stored", "disk_dropped", "disk_evicted", "disk_loaded", "disk_arrived", "disk_bad"), 8),
    "lost": 8,
    "pools": 8,  # in a stage only after a failed step
}


def each_stage(least: int = 1) -> pytest.MarkDecorator:
    chosen = [stage for stage in STAGES if stage.number >= least]
    return pytest.mark.parametrize("stage", chosen, ids=[f"s{stage.number}" for stage in chosen])


ends = pytest.mark.parametrize("stage", [STAGES[0], STAGES[-1]], ids=str)
PACKAGE_ALONE = {
    ("end", "repetition"),
    ("preempt", "step failed"),
    ("preempt", "reset"),
    ("preempt", "lost"),
    ("evicted", "lost"),
    ("given_back", "draft"),
    ("evicted", "reset"),
    ("host_evicted", "reset"),
}


@cache
def events_of(stage):
    """Return the events of a few histories. A third of the traces begin in the middle."""
    histories = []
    for seed in range(12):
        plan = random_plan(stage, random.Random(seed), 20)
        histories.append(play_traced(stage, plan, num_before=8 if stage.has_engine and seed % 3 == 1 else 0))
    return histories


def all_events(stage):
    return [event for history in events_of(stage) for event in history]


# Replay


@pytest.mark.parametrize("stage", [*(full(stage) for stage in STAGES[:-1]), STAGES[-1]], ids=str)
def test_replay_gives_the_state_after_each_step(stage):
    """play_traced() compares the states."""
    steps = [event for event in all_events(stage) if event["kind"] == "step"]
    assert len(steps) > 40, "this tests too little"


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=pytest.mark.nightly if part else pytest.mark.full) for part in range(10)]
)
@each_stage()
def test_replay_gives_the_state_after_each_step_of_long_histories(stage, part):
    for history in range(part * 6, part * 6 + 6):
        plan = history_plan(stage, 5, history)
        play_traced(stage, plan, num_before=history % 3 * 10 if stage.has_engine else 0)


@each_stage()
def test_comparison_finds_a_wrong_event(stage, monkeypatch):
    """The replay appends each token twice."""

    def twice(state, seq, event):
        change_sequence(state, seq, event)
        if event["kind"] == "token":
            change_sequence(state, seq, event)

    change_sequence = replaying.change_sequence
    monkeypatch.setattr(replaying, "change_sequence", twice)
    with pytest.raises(AssertionError):
        for seed in range(9):
            play_traced(stage, random_plan(stage, random.Random(seed), 20))


# The format


@each_stage()
def test_each_kind_of_event_occurs_from_its_stage_on_with_exactly_its_keys(stage):
    forms_of = {}
    for event in all_events(stage):
        forms_of.setdefault(event["kind"], set()).add(frozenset(event))
    expected = {kind for kind in KEYS if FIRST.get(kind, 1) <= stage.number}
    if stage.number > 1:
        expected -= ONLY_FIRST
    assert forms_of.keys() - {"pools"} == expected  # "pools" depends on whether a step failed
    for kind, forms in forms_of.items():
        assert forms == {frozenset({*KEYS[kind], *COMMON_KEYS} - ({"by"} if kind in WITHOUT_BY else set()))}


@each_stage()
def test_every_why_is_documented(stage):
    assert whys_of(all_events(stage)) <= documented_whys()


def whys_of(events):
    """Return (kind, why) of each event with a reason. A refusal's is a sentence."""
    return {(event["kind"], event["why"]) for event in events if "why" in event and event["kind"] != "refused"}


@pytest.mark.nightly
def test_every_why_occurs():
    whys = set()
    for stage in STAGES:
        for seed in range(60):
            whys |= whys_of(play_traced(stage, random_plan(stage, random.Random(f"why {seed}"), 40)))
    assert whys == documented_whys() - PACKAGE_ALONE


def test_reference_documents_every_kind_with_its_keys():
    """EVENTS.md and events.py must agree."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in EVENTS.splitlines() if line[:2] == "| "]
    documented = {kind: (*keys.split(", "),) for kinds, keys, *_ in rows for kind in kinds.split(", ") if kind in KEYS}
    assert documented == {kind: keys for kind, keys in KEYS.items() if kind != "snapshot"}
    state = re.findall(r"^\| ([a-z_, ]+) \|", EVENTS.partition("| key of state |")[2].partition("## ")[0], re.MULTILINE)
    [snapshot, *_] = all_events(STAGES[-1])
    assert {name for names in state for name in names.split(", ")} == snapshot["state"].keys()


@each_stage()
def test_by_names_a_function_of_the_stage(stage):
    functions = set()
    for path in folder_of(stage.name).glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                functions |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    assert {event["by"] for event in all_events(stage) if "by" in event} <= functions


@each_stage()
def test_held_up_sequences_need_more_than_is_free(stage):
    for history in events_of(stage):
        held_up = [event for event in history if event["kind"] == "held_up"]
        assert len(held_up) == len({event["step"] for event in held_up}), "more than one in a step"
        admitted = {(event["step"], event["seq"]) for event in history if event["kind"] == "admit"}
        for event in held_up:
            assert (event["step"], event["seq"]) not in admitted
            assert (event["needed"] is None) == (event["free"] is None)
            assert event["needed"] is None or event["needed"] > event["free"] >= 0, event


# traced()

OPTIONS = {"kv_cache_tokens": 128, "max_model_len": 64, "max_num_seqs": 3}
PROMPTS = ["Once upon a time", "The fox said that", "Once upon a time"]


@cache
def storyteller(stage):
    """Return an LLM with a tiny pool, and its tracer. A sequence waits, and from stage 4 on one is preempted."""
    options = OPTIONS | ({"block_size": 4} if stage.number > 1 else {"reservation": "request"})
    options |= {"kv_cache_tokens": 40} if stage.has_engine else {}
    options |= {"offload_policy": "load", "kv_offloading_tokens": 64} if stage.has_tiers else {}
    tracer = Tracer()
    return stage.module.LLM(STORYTELLER, observer=tracer, **options), tracer


def tokens_of(outputs):
    return [(output.outputs[0].token_ids, output.outputs[0].text, output.error) for output in outputs]


@pytest.mark.parametrize("stage", [STAGES[0], STAGES[-1], full(STAGES[3])], ids=str)
def test_tracing_does_not_change_outputs(stage, tmp_path):
    llm, tracer = storyteller(stage)
    params = [stage.module.SamplingParams(max_tokens=12, seed=seed) for seed in (1, 2, 3)]
    before = tokens_of(llm.generate(PROMPTS, params))
    file = tmp_path / "run.jsonl"
    with traced(llm, file, tracer):
        assert tokens_of(llm.generate(PROMPTS, params)) == before
    size = file.stat().st_size
    assert tokens_of(llm.generate(PROMPTS, params)) == before and file.stat().st_size == size
    events = list(read_trace(file))
    assert events[0]["stage"] == stage.name.removeprefix("stages.") and len(list(states(events))) == events[-1]["step"]
    tokens = {}
    for event in events:
        if event["kind"] == "token":
            tokens.setdefault(event["seq"], []).append(event["token"])
    assert [*tokens.values()] and sorted(tokens.values()) == sorted(token_ids for token_ids, _, _ in before)
    [first, *_] = [event for event in events if event["kind"] == "arrive"]
    assert "".join(first["texts"]).strip() == PROMPTS[0]


@ends
def test_only_one_trace_at_a_time(stage):
    llm, tracer = storyteller(stage)
    events = []
    with (
        traced(llm, events.append, tracer),
        pytest.raises(ValueError, match="traced already"),
        traced(llm, print, tracer),
    ):
        pass
    assert [event["kind"] for event in events] == ["snapshot"]


def test_only_an_engine_can_be_traced():
    with pytest.raises(ValueError, match=r"llm must be .*, got dict"), traced({}, print):
        pass


def test_tracing_cannot_begin_within_a_static_batch():
    llm, tracer = storyteller(STAGES[1])
    stream = llm.stream(PROMPTS, STAGES[1].module.SamplingParams(max_tokens=2))
    next(stream)
    with pytest.raises(ValueError, match="of this LLM is open"), traced(llm, print, tracer):
        pass
    stream.close()


@ends
def test_failing_sink_does_not_disturb_the_run(stage):
    llm, tracer = storyteller(stage)
    params = stage.module.SamplingParams(max_tokens=9, temperature=0.0)
    before = tokens_of(llm.generate(PROMPTS, params))
    events = []

    def sink(event):
        events.append(event)
        if len(events) == 20:
            raise OSError(28, "No space left on device")

    outputs = None
    with pytest.raises(OSError, match="No space left"), traced(llm, sink, tracer):
        outputs = llm.generate(PROMPTS, params)
    assert tokens_of(outputs) == before and len(events) == 20


@each_stage(4)
def test_closing_a_trace_within_a_step_marks_the_step(stage):
    llm, tracer = storyteller(stage)
    events = []
    with traced(llm, events.append, tracer):
        tracer.on_begin()
    assert events[-1]["kind"] == "step" and events[-1]["error"] == "the trace was closed in this step"


@each_stage()
def test_next_step_closes_a_step_that_raised(stage):
    """A stage reports no end of such a step."""
    llm, tracer = storyteller(stage)
    events = []
    with traced(llm, events.append, tracer):
        tracer.on_begin()
        llm.generate(PROMPTS, stage.module.SamplingParams(max_tokens=2))
    steps = [event for event in events if event["kind"] == "step"]
    assert [step["error"] for step in steps[:2]] == ["the step broke off", None] and len(steps) > 2


# Chrome's format


@each_stage()
def test_chrome_traces_follow_the_format(stage):
    phases = Counter()
    for history in events_of(stage):
        trace = convert(history)
        check_format(trace)
        phases.update(event["ph"] for event in trace["traceEvents"])
    assert phases["X"] > 100 and phases["C"] > 100 and phases["M"] > 10
    assert (phases["s"] > 0) == stage.has_samples and (phases["b"] > 0) == stage.has_tiers


def test_slices_are_named_after_the_work_of_a_sequence():
    options = EngineOptions(4, 8, 40, 4, 8, 0.0, True, 0, "load", "request", (0,))
    request = Request(0, 9, (), follows=False, n=1, max_tokens=12, seed=2, stop_token_ids=())
    slices = convert(play_traced(STAGES[3], Plan(options, [request, request, request, Drain()])))
    names = Counter(
        event["name"] for event in slices["traceEvents"] if event["ph"] == "X" and event["cat"] == "sequence"
    )
    assert {*names} == {"waiting", "prefill", "decode", "preempted", "recompute"}
    tokens = [event["args"]["tokens"] for event in slices["traceEvents"] if event["name"] == "decode"]
    assert {*tokens} == {1}


# python -m stages


@pytest.mark.parametrize("stage", [full(STAGES[0]), STAGES[-1]], ids=str)
def test_command_writes_a_trace(stage, tmp_path, capsys):
    file = tmp_path / "run.jsonl"
    arguments = [str(stage.number), "A fox", "--max-tokens", "3", "--kv-cache-tokens", "64", "--max-model-len", "32"]
    if stage.has_tiers:
        arguments += ["--offload-policy", "load"]
    assert launcher.main([*arguments, "--trace", str(file)]) == 0
    assert [event["kind"] for event in read_trace(file)].count("token") == 3
    assert capsys.readouterr().err == ""
    assert launcher.main([*arguments, "--trace=/dev/full"]) == 1
    out, err = capsys.readouterr()
    assert "tokens/s" in out and err == "error: the trace: [Errno 28] No space left on device\n"
    file.write_text("something else\n")
    assert launcher.main([*arguments, "--trace", str(file)]) == 2
    assert "is not a trace" in capsys.readouterr().err and file.read_text() == "something else\n"
