"""`make play`: a learner's run is compared with its stage's, step by step. test_page_browser.py has the page itself."""

import json
from copy import deepcopy
from functools import cache
from itertools import takewhile

import pytest

from notebooks.page.build import PAGE, load, unpack
from notebooks.page.play import (
    Crash,
    Recorded,
    Verdict,
    build,
    compare,
    finish,
    main,
    playable,
    record_both,
    start,
    workloads,
)
from notebooks.page.record import MAX_STEPS
from notebooks.page.traps import TRAPS
from stages.tools.chain import load as load_chain
from stages.tools.exercise.folder import copy_stage, open_functions
from stages.tools.exercise.functions import find
from stages.tools.exercise.variants import mistakes, solutions
from tests.helpers import ROOT, full, nightly

STAGES = {stage.key: stage for stage in load_chain(ROOT).stages}


@pytest.fixture(scope="module")
def runs():
    """Return the events of each stage on the committed page."""
    content = load(PAGE)
    unpacked = {run["name"]: unpack(content["kinds"], content["strings"], run["events"]) for run in content["runs"]}
    return {run["name"]: [run["snapshot"], *unpacked[run["name"]]] for run in content["runs"]}


def verdict_on(stage, theirs, yours, crash=None) -> Verdict:
    return compare(STAGES[stage], Recorded(theirs, None), Recorded(yours, crash))


# What is the same


def test_equal_runs_are_the_same(runs):
    verdict = verdict_on("s4", runs["s4"], deepcopy(runs["s4"]))
    num_steps = runs["s4"][-1]["step"]
    assert verdict.is_same and verdict.title == f"All {num_steps} steps are the same as stage 4's."


def test_a_hash_may_be_any_value(runs):
    """A learner may hash with SHA-256, or not at all: what counts is which blocks have equal hashes."""
    yours = [event | {"hash": f"sha256 of {event['hash']}"} if "hash" in event else event for event in runs["s7"]]
    assert verdict_on("s7", runs["s7"], yours).is_same


def test_order_within_a_step_does_not_count(runs):
    steps, step = [], []
    for event in runs["s5"][1:]:
        step.append(event)
        if event["kind"] == "step":
            steps.append(step)
            step = []
    yours = [runs["s5"][0], *(event for step in steps for event in [*step[-2::-1], step[-1]])]
    assert yours != runs["s5"] and verdict_on("s5", runs["s5"], yours).is_same


def test_other_block_numbers_are_reported_and_are_no_fault(runs):
    """Any free block serves: a pool may hand out its blocks from the other end."""
    swapped = {name: lambda block: 39 - block for name in ("block", "from", "to")}
    yours = [
        {
            name: swapped[name](value) if name in swapped and isinstance(value, int) else value
            for name, value in e.items()
        }
        for e in runs["s2"]
    ]
    verdict = verdict_on("s2", runs["s2"], yours)
    assert verdict.is_same and "same tokens and decisions" in verdict.title
    assert "From step 1 on, your requests hold other blocks" in verdict.lines[0]


# Where runs part


def test_a_different_token_parts_the_runs(runs):
    yours = deepcopy(runs["s3"])
    token = next(event for event in yours if event["kind"] == "token" and event["step"] == 9)
    token |= {"token": 5, "text": " moon"}
    verdict = verdict_on("s3", runs["s3"], yours)
    assert verdict.step == 9 and verdict.seqs == (token["seq"],) and verdict.blocks == ()
    assert verdict.lines[1] == f"Yours: {token['seq']} gets the token ' moon'."
    assert verdict.look_at[0] == "PagedAttention._attend" and "merge_attn_states" in verdict.look_at


def test_a_different_decision_names_the_function_that_made_it(runs):
    first = next(event for event in runs["s4"] if event["kind"] == "preempt")
    yours = [event | {"seq": "B"} if event is first else event for event in runs["s4"]]
    verdict = verdict_on("s4", runs["s4"], yours)
    assert verdict.title == f"In step {first['step']}, your run parts from stage 4's."
    assert verdict.lines[:2] == ("Stage 4: G is preempted.", "Yours: B is preempted.")
    assert verdict.look_at[0] == first["by"] and set(verdict.seqs) == {"G", "B"}


def test_another_order_of_requests_names_the_function_that_puts_them_back_in_line(runs):
    first = next(e for e in runs["s4"] if e["kind"] == "preempt")
    wait = next(e for e in runs["s4"] if e["kind"] == "held_up" and e["step"] > first["step"])
    yours = [event | {"seq": "A"} if event is wait else event for event in runs["s4"]]
    assert verdict_on("s4", runs["s4"], yours).look_at[0] == "Scheduler._preempt"


def test_an_observer_that_hears_of_no_wait_names_the_function_that_tells_it(runs):
    yours = [event for event in runs["s4"] if event["kind"] != "held_up"]
    assert verdict_on("s4", runs["s4"], yours).look_at == ("Scheduler.schedule",)


def test_a_missing_copy_names_the_functions_that_pass_it_on(runs):
    yours = [event for event in runs["s5"] if event["kind"] != "copied"]
    assert "Scheduler._take" in verdict_on("s5", runs["s5"], yours).look_at


def test_a_load_may_be_collected_a_step_earlier(runs):
    late = [event for event in runs["s7"] if event["kind"] != "arrived"]
    assert any(event["kind"] == "arrived" for event in runs["s7"])
    assert verdict_on("s7", runs["s7"], late).is_same


def test_the_first_difference_is_shown_if_a_later_one_is_decisive(runs):
    """The wrong block is the cause, and the wrong tokens that follow are the effect."""
    yours = deepcopy(runs["s2"])
    taken = next(event for event in yours if event["kind"] == "taken" and event["step"] == 3)
    taken["block"] = 39
    for event in yours:
        if event["kind"] == "token" and event["step"] > 5:
            event["token"] = 5
    verdict = verdict_on("s2", runs["s2"], yours)
    assert verdict.step == 3 and 39 in verdict.blocks and verdict.look_at[0] == taken["by"]


def test_runs_with_the_same_tokens_in_other_steps_are_said_to_have_them(runs):
    """A learner who waits for a load before anything else runs computes the same, a little later."""
    yours = [event | {"step": event["step"] + (event["step"] >= 30)} for event in runs["s7"]]
    yours.insert(next(i for i, e in enumerate(yours) if e["step"] == 31), {"kind": "step", "step": 30, "error": None})
    verdict = verdict_on("s7", runs["s7"], yours)
    assert verdict.step == 30 and verdict.lines[2].startswith("Every request still gets the same tokens")
    token = next(event for event in yours if event["kind"] == "token" and event["step"] == 40)
    yours[yours.index(token)] = token | {"token": 5}
    assert verdict_on("s7", runs["s7"], yours).lines[2].startswith("Some requests get other tokens")


def test_a_run_that_ends_early_or_late_parts_there(runs):
    last = runs["s4"][-1]["step"]
    early = list(takewhile(lambda event: event["step"] < last, runs["s4"]))
    assert verdict_on("s4", runs["s4"], early).step == last
    late = [*runs["s4"], {"kind": "step", "step": last + 1, "error": None}]
    verdict = verdict_on("s4", runs["s4"], late)
    assert (verdict.step, verdict.lines[1]) == (last + 1, "Yours: the run goes on.")


def test_a_crash_is_shown_at_its_step_unless_the_runs_have_parted_before(runs):
    place = {"file": "block_pool.py", "line": 8, "function": "BlockPool.get_new_blocks"}
    crash = Crash("IndexError: pop from empty list", place, "BlockPool.get_new_blocks")
    start = [event for event in runs["s2"] if event["step"] < 7]
    yours = [*start, {"kind": "step", "step": 7, "error": "the trace was closed in this step"}]
    verdict = verdict_on("s2", runs["s2"], yours, crash)
    assert (verdict.step, verdict.title) == (7, "Your code stops in step 7.")
    assert verdict.lines[0] == "IndexError: pop from empty list"
    assert verdict.lines[1] == "exercises/s2/block_pool.py, line 8, BlockPool.get_new_blocks"
    assert verdict.look_at == ("BlockPool.get_new_blocks",)
    token = next(event for event in yours if event["kind"] == "token" and event["step"] == 4)
    yours[yours.index(token)] = token | {"token": 5}
    assert verdict_on("s2", runs["s2"], yours, crash).title.startswith("In step 4, your run parts")


def test_slots_outside_of_the_pool_are_not_played(runs):
    reserved = next(i for i, event in enumerate(runs["s1"]) if event["kind"] == "reserved")
    for slots in (range(-4, 8), range(8, 8), range(300, 400)):
        absurd = {"kind": "reserved", "step": 1, "seq": "A", "start": slots.start, "end": slots.stop}
        events = [*runs["s1"][:reserved], absurd, *runs["s1"][reserved:]]
        assert playable(events, 1) == playable(runs["s1"], 1)


def test_another_range_of_slots_names_the_functions_that_find_it(runs):
    first = next(event for event in runs["s1"] if event["kind"] == "reserved")
    moved = {"start": first["start"] + 1, "end": first["end"] + 1}
    yours = [event | moved if event is first else event for event in runs["s1"]]
    verdict = verdict_on("s1", runs["s1"], yours)
    assert verdict.lines[1] == f"Yours: {first['seq']} reserves the slots from {moved['start']} to {moved['end']}."
    assert "SlotManager._first_fit" in verdict.look_at and first["seq"] in verdict.seqs


def test_a_sequence_that_ends_late_names_the_functions_that_end_it(runs):
    ends = [event for event in runs["s1"] if event["kind"] == "end" and event["why"] == "stop"]
    assert ends, "the workload has a stop string"
    yours = [e for e in runs["s1"] if not (e["step"] == ends[0]["step"] and e["kind"] in ("end", "released"))]
    assert verdict_on("s1", runs["s1"], yours).look_at == ("Sequence.append_token", "Sequence._cut_at_stop_string")


def test_events_that_cannot_have_happened_are_not_played(runs):
    step = next(i for i, event in enumerate(runs["s4"]) if event["kind"] == "step" and event["step"] == 2)
    absurd = [
        {"kind": "given_back", "step": 2, "block": 3, "seq": "nobody", "why": "end"},
        {"kind": "taken", "step": 2, "block": 99, "seq": "A", "index": 4, "why": "grow"},
        {"kind": "free", "step": 2, "block": -1, "place": "front"},
        {"kind": "evicted", "step": 2, "block": 5, "hash": "00", "why": "taken"},
    ]
    assert playable([*runs["s4"][:step], *absurd, *runs["s4"][step:]], 2) == runs["s4"][: step + 1]


# Learners' code: a planted fault in each stage

FAULTS = {  # of an otherwise solved exercise: a function, a piece of its body and what takes its place (all if empty)
    "s1": ("sequence.py", "Sequence._cut_at_stop_string", "", "return False"),
    "s2": ("block_manager.py", "BlockManager.append_slot", " > ", " >= "),
    "s3": ("online_softmax.py", "merge_attn_states", "", "return a"),
    "s4": ("scheduler.py", "Scheduler._may_admit", "self._watermark_blocks", "0"),
    "s5": ("kv_cache.py", "KVCache.copy_blocks", "", "pass"),
    "s6": ("prefix_cache.py", "hash_block_tokens", "", "return bytes(token_ids[0] % 256 for _ in range(16))"),
    "s7": ("host_tier.py", "HostTier.load", "self.blocks[source]", "self.blocks[source - 1]"),
}


def plant(key, folder, file, name, old, new):
    """Write a solved exercise with one faulty function."""
    stage = STAGES[key]
    function = find(stage.text(file), name)
    assert function and old in function.body, f"{key} has another {name} now: plant another fault"
    body = function.body.replace(old, new) if old else f"{function.indent}{new}\n"
    copy_stage(stage, folder, {file: function.with_body(body)})
    return folder


first_and_last = pytest.mark.parametrize("key", [full(key) if key in ("s2", "s7") else nightly(key) for key in FAULTS])


@first_and_last
def test_planted_fault_is_located(key, tmp_path):
    folder = plant(key, tmp_path / "exercises" / key, *FAULTS[key])
    verdict = build(STAGES[key], folder, tmp_path / "page.html")
    assert not verdict.is_same and "parts from" in verdict.title
    assert FAULTS[key][1] in verdict.look_at and verdict.blocks + verdict.seqs
    source = verdict.source
    assert source and source["name"] == verdict.look_at[0] and str(source["file"]).startswith(f"exercises/{key}/")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Return a function that records a stage's own run of a workload, once."""

    @cache
    def recorded(key: str, workload: str) -> Recorded:
        target = tmp_path_factory.mktemp("theirs") / "events"
        return finish(start(STAGES[key], STAGES[key].folder, target, workload), target)

    return recorded


def verdicts(key, reference, folder):
    """Yield the verdict on each workload."""
    for workload in workloads(STAGES[key]):
        target = folder.with_suffix(f".{workload}")
        yours = finish(start(STAGES[key], folder, target, workload), target)
        yield compare(STAGES[key], reference(key, workload), yours)


@pytest.mark.nightly
@pytest.mark.parametrize("key", FAULTS)
def test_another_solution_is_not_called_wrong(key, reference, tmp_path):
    for number, (name, texts) in enumerate(solutions(STAGES[key]).items()):
        folder = tmp_path / f"exercises/s{number}"
        copy_stage(STAGES[key], folder, texts)
        for verdict in verdicts(key, reference, folder):
            assert verdict.is_same or "still gets the same tokens" in verdict.lines[2], f"{name}: {verdict}"


@pytest.mark.nightly
@pytest.mark.parametrize("key", FAULTS)
def test_every_mistake_is_seen_unless_it_says_why_not(key, reference, tmp_path, monkeypatch):
    """The page's requests show it, or those with traps. Beam search, which is optional, is not played."""
    monkeypatch.setenv("SECONDS_FOR_A_STEP", "5")
    seen, unseen = [], []
    for number, (mistake, texts) in enumerate(mistakes(STAGES[key])):
        folder = tmp_path / f"exercises/s{number}"
        copy_stage(STAGES[key], folder, texts)
        if not STAGES[key].is_optional(mistake.step):
            is_same = all(verdict.is_same for verdict in verdicts(key, reference, folder))
            (unseen if is_same else seen).append(mistake)
    assert [each.path for each in unseen if not each.unseen] == [], "play shows no difference"
    assert [each.path for each in seen if each.unseen] == [], "these say that play can't show them"
    assert seen


@pytest.mark.parametrize("key", [full(key) for key in TRAPS])
def test_requests_with_traps_are_all_served(key, reference):
    run = reference(key, "traps")
    assert run.crash is None and run.events[-1]["step"] <= MAX_STEPS
    ended = {event["seq"].partition(".")[0] for event in run.events if event["kind"] in ("end", "refused")}
    assert ended == {request.name for request in TRAPS[key].requests}
    assert not any(event["kind"] == "refused" for event in run.events)


WITHOUT_PARENT = ("prefix_cache.py", "hash_block_tokens", "parent + ", "")


def test_a_hash_without_its_parent_shows_where_a_text_repeats_itself(tmp_path):
    folder = plant("s6", tmp_path / "exercises/s6", *WITHOUT_PARENT)
    verdict = compare(STAGES["s6"], *record_both(STAGES["s6"], folder, "traps"))
    assert verdict.step == 1 and verdict.look_at[0] == "hash_block_tokens"
    assert verdict.lines[0].endswith(" is cached.") and verdict.lines[1] == "Yours: nothing of the kind."


def test_a_request_that_gets_no_tokens_does_not_get_the_same(reference, tmp_path):
    """If the block of its last token is a hit, a request has nothing to compute, and never ends."""
    fault = ("block_manager.py", "BlockManager.find_hits", "(seq.num_tokens - 1)", "seq.num_tokens")
    folder, target = plant("s6", tmp_path / "exercises/s6", *fault), tmp_path / "events"
    yours = finish(start(STAGES["s6"], folder, target, "traps"), target)
    verdict = compare(STAGES["s6"], reference("s6", "traps"), yours)
    assert not any(event["kind"] == "token" and event["seq"] == "N" for event in yours.events)
    assert verdict.look_at[0] == "BlockManager.find_hits"
    assert verdict.lines[2].startswith("Some requests get other tokens")


def test_a_request_may_be_aborted_earlier_and_gets_the_same_tokens_until_then(runs):
    """One that is late is aborted in the same step, with a token less. Nobody aborts D."""
    for seq, words in (("H", "Every request still gets the same tokens"), ("D", "Some requests get other tokens")):
        [*_, last] = (event for event in runs["s6"] if event["kind"] == "token" and event["seq"] == seq)
        yours = [event for event in runs["s6"] if event is not last]
        assert verdict_on("s6", runs["s6"], yours).lines[2].startswith(words)


@pytest.mark.full
def test_fault_that_the_pages_requests_do_not_show_gets_two_tabs_with_others(tmp_path):
    folder = plant("s6", tmp_path / "exercises/s6", *WITHOUT_PARENT)
    verdict = build(STAGES["s6"], folder, tmp_path / "page.html")
    content = load(tmp_path / "page.html")
    names = [run["name"] for run in content["runs"]]
    theirs, yours = content["runs"][names.index("s6") :][:2]
    assert not verdict.is_same and len(names) == 8 and theirs["moments"] == []
    assert "other requests" in theirs["idea"] and theirs["events"] != load(PAGE)["runs"][names.index("s6")]["events"]
    unpacked = [[*unpack(content["kinds"], content["strings"], run["events"])] for run in (theirs, yours)]
    arrivals = [[e["seq"] for e in events if e["kind"] == "arrive" and e["step"] == 1] for events in unpacked]
    assert arrivals[0] == arrivals[1] == ["A"]


@first_and_last
def test_solved_exercise_is_the_same_to_the_end(key, tmp_path):
    folder = tmp_path / "exercises" / key
    copy_stage(STAGES[key], folder, {})
    assert build(STAGES[key], folder, tmp_path / "page.html").is_same
    names = [run["name"] for run in load(tmp_path / "page.html")["runs"]]
    assert names[names.index(key) + 1] == "yours" and len(names) == 8


@first_and_last
def test_function_that_is_not_written_is_named(key, tmp_path):
    folder = tmp_path / "exercises" / key
    copy_stage(STAGES[key], folder, open_functions(STAGES[key], 1))
    verdict = build(STAGES[key], folder, tmp_path / "page.html")
    assert not verdict.is_same and verdict.look_at


@pytest.mark.parametrize(
    "body, error",
    [
        full("while True: pass", "TimeoutError: no step has ended for 5 seconds: is there an infinite loop?"),
        full("import os; os._exit(3)", "Python ended with status 3"),
        full("raise RuntimeError('mine')", "RuntimeError: mine"),
        full("return (", "SyntaxError: '(' was never closed"),
    ],
)
def test_crash_is_shown(body, error, tmp_path, monkeypatch):
    monkeypatch.setenv("SECONDS_FOR_A_STEP", "5")
    folder = plant("s2", tmp_path / "exercises/s2", "block_pool.py", "BlockPool.get_new_blocks", "", body)
    verdict = build(STAGES["s2"], folder, tmp_path / "page.html")
    assert (verdict.step, verdict.title, verdict.lines[0]) == (1, "Your code stops in step 1.", error)
    if "status" not in error:
        assert verdict.lines[1].startswith("exercises/s2/block_pool.py, line ")
    assert json.dumps(verdict.title)[1:-1] in (tmp_path / "page.html").read_text(encoding="utf-8")


MISREPORTED = {  # what append_slot or fork tells, what it ought to tell, and a piece of the verdict
    "swapped": ('"fork", child, parent', '"fork", parent, child', 'The "fork" that BlockManager.fork tells'),
    "one missing": ('"fork", child', '"fork", parent, child', 'The "fork" that BlockManager.fork tells'),
    "no copy": ('"grow", seq', '"grow", seq, copy', 'The "grow" that BlockManager.append_slot tells'),
    "unless it copies": (
        '"grow" if copy is None else "", seq, copy',
        '"grow", seq, copy',
        'BlockManager.append_slot does not tell the observer "grow" here',
    ),
}


@pytest.mark.parametrize("case", ["swapped", full("one missing"), "no copy", full("unless it copies")])
def test_event_that_makes_no_sense_is_traced_to_the_function_that_tells_it(case, reference, tmp_path):
    """Even if the given code crashes later, because the observer can't make sense of the next event."""
    mine, right, words = MISREPORTED[case]
    name = "BlockManager.fork" if "fork" in right else "BlockManager.append_slot"
    folder = plant("s5", tmp_path / "exercises/s5", "block_manager.py", name, right, mine)
    yours = finish(start(STAGES["s5"], folder, tmp_path / "events", "page"), tmp_path / "events")
    verdict = compare(STAGES["s5"], reference("s5", "page"), yours)
    assert verdict.step == 7 and verdict.look_at[0] == name
    assert sum(words in line for line in verdict.lines) == 1
    assert not any("engine.py" in line or "as good" in line for line in verdict.lines)


def test_crash_in_given_code_is_said_to_be_there_and_names_the_functions_that_ran_last(reference, tmp_path):
    fault = ("scheduler.py", "Scheduler._take", "append((seq, num_tokens))", "append((num_tokens, seq))")
    folder, target = plant("s5", tmp_path / "exercises/s5", *fault), tmp_path / "events"
    yours = finish(start(STAGES["s5"], folder, target, "page"), target)
    verdict = compare(STAGES["s5"], reference("s5", "page"), yours)
    assert verdict.step == 1 and verdict.lines[1].startswith("in the given code: exercises/s5/")
    assert verdict.look_at[0] == "Scheduler._take" and all(name in verdict.lines[2] for name in verdict.look_at)


def test_crash_in_a_function_of_the_exercise_or_of_ones_own_is_not_said_to_be_in_given_code(runs):
    for function in ("BlockPool.get_new_blocks", "BlockPool.a_helper_of_mine", "BlockManager.check_integrity"):
        crash = Crash("IndexError: mine", {"file": "block_pool.py", "line": 8, "function": function})
        lines = verdict_on("s2", runs["s2"], runs["s2"][:1], crash).lines
        assert any("given code" in line for line in lines) == (function == "BlockManager.check_integrity")


def test_missing_exercise_is_reported_in_one_line(capsys):
    assert main(["more_two_ranks", "--no-browser"]) == 2
    assert "stage more_two_ranks has no exercise" in capsys.readouterr().err


def test_branch_that_the_page_lacks_is_reported_in_one_line(capsys, tmp_path, monkeypatch):
    """Even if its exercise has been written."""
    monkeypatch.setattr("notebooks.page.play.exercise_folder", lambda stage: tmp_path)
    assert main(["more_speculation", "--no-browser"]) == 2
    assert capsys.readouterr().err == "play: the page has no branches: play works for stages 1 to 7\n"
