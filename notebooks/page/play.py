"""python -m notebooks.page.play 3: play requests on exercises/s3, beside stage 3, and open exercises/s3.html.

worker.py records both runs. They are compared step by step, up to the first one in which events or tokens part, or in
which the exercise crashes. The page gets a tab for the exercise that ends there. The requests are those of the page,
and if the runs never part on them, those of traps.py, on which typical mistakes show.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import webbrowser
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, takewhile, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.trace import State, apply
from nanovllm.trace.events import KEYS, Event
from nanovllm.trace.replay import begin
from notebooks.page.build import PAGE, STAGES, Excerpt, Packer, all_excerpts, load, page
from notebooks.page.record import ROOT, label, tidy
from notebooks.page.traps import TRAPS
from stages.tools.chain import ChainError, Stage
from stages.tools.chain import load as load_chain
from stages.tools.exercise.folder import exercise_folder, step_of

SECONDS = 240  # for a run of all steps; worker.py stops a single step earlier
MAX_WORDS = 3  # events of each run that the page names
NAME = "yours"  # of the tab

# Where to look for the cause of a difference, by the kind of event that only one run has, the most telling kind first:
# the last part of the functions' names, the likeliest first.
LOOK_AT = {
    "arrive": ("process", "add"),
    "reserved": ("allocate", "_first_fit", "free_ranges"),
    "preempt": ("_preempt", "schedule"),
    "hit": ("find_hits", "hash_block_tokens", "extend_block_hashes", "cache_blocks", "allocate"),
    "loaded": ("_load", "load", "find_hits"),
    "stored": ("store", "get_new_blocks"),
    "renewed": ("store", "get_new_blocks"),
    "host_evicted": ("store",),
    "forked": ("_fork_samples", "fork", "_take"),
    "copied": ("append_slot", "copy_blocks", "_take"),
    "shared": ("fork", "touch"),
    "evicted": ("get_new_blocks", "free_blocks"),
    "cached": ("hash_block_tokens", "extend_block_hashes", "cache_blocks", "cache_block", "_load"),
    "held_up": ("_may_admit", "can_promise", "num_needed", "schedule", "_preempt"),
    "admit": ("schedule", "_may_admit", "can_promise", "allocate", "_preempt"),
    "taken": ("get_new_blocks", "allocate", "append_slot"),
    "given_back": ("free", "append_slot", "free_blocks"),
    "free": ("free_blocks", "free"),
    "idle": ("free_blocks", "free"),
    "chunk": ("schedule", "_take", "is_ready"),
    "token": (
        "_attend", "attend_part", "merge_attn_states", "_metadata", "read", "write", "_slot", "copy_blocks", "load",
        "store", "hash_block_tokens", "compute_logits",
    ),
    "end": ("append_token", "_cut_at_stop_string"),
    "released": ("free",),
}  # fmt: skip
ADMISSION = ("held_up", "admit")
RECORDERS = ("hit", "token", "cached")  # kinds that the engine reports later than it decides them

WORDS = {
    "arrive": "{seq} arrives",
    "refused": "{request} is rejected",
    "held_up": "{seq} has to wait (reason: {why})",
    "admit": "{seq} is admitted, with {num_computed_tokens} tokens computed",
    "reserved": "{seq} reserves the slots from {start} to {end}",
    "released": "{seq} gives back the slots from {start} to {end}",
    "taken": "{seq} takes block {block}",
    "shared": "{seq} shares block {block} with {from}",
    "hit": "{seq} finds block {block} in the cache",
    "given_back": "{seq} gives back block {block}",
    "free": "block {block} goes to the front of the free queue",
    "idle": "block {block} goes to the back of the free queue and keeps its text",
    "copied": "block {from} is copied into block {to}",
    "cached": "block {block} is cached",
    "evicted": "block {block} is evicted",
    "stored": "block {from} is stored in block {to} of the host",
    "renewed": "block {to} of the host becomes the most recently used",
    "host_evicted": "the host evicts its block {block}",
    "loaded": "block {from} of the host is loaded into block {to}",
    "forked": "{seq} is forked from {from}",
    "chunk": "{seq} computes tokens {start} to {end}",
    "token": "{seq} gets the token {text!r}",
    "preempt": "{seq} is preempted",
    "abort": "{request} is aborted",
    "end": "{seq} ends (reason: {why})",
    "step": "the run goes on",
}
SEQUENCES = ("seq", "request", "for", "behind", "carried_by")  # fields that name one
# "needed", "free" and "place" explain a wait, and are not decisions.
NOT_COMPARED = {"by", "function", "step", "error", "texts", "needed", "free", "place"}
BLOCKS = ("block", "from", "to")


class Crash(NamedTuple):
    """The end of a run that did not finish."""

    error: str
    place: dict[str, Any] | None = None  # file, line and function
    function: str | None = None  # the exercise's function that it came through
    told: str | None = None  # the kind of event that the tracer could not make sense of, if it was the tracer's
    ran: Sequence[str] = ()  # the exercise's functions that ran last, the last one first


class Recorded(NamedTuple):
    """A run of the workload. Its first event is the snapshot and its last one a step, unless it has no events."""

    events: list[Event]
    crash: Crash | None


class Difference(NamedTuple):
    """The first step in which two runs differ: the events that only one of them has, in order."""

    step: int
    theirs: list[Event]
    yours: list[Event]


@dataclass(frozen=True)
class Verdict:
    """The result of the comparison, as the page shows it."""

    step: int  # the last one of the exercise's run that is shown
    title: str
    lines: tuple[str, ...] = ()
    is_same: bool = False
    blocks: tuple[int, ...] = ()  # to mark in that step, and so are the sequences
    seqs: tuple[str, ...] = ()
    look_at: tuple[str, ...] = ()  # names of functions
    source: dict[str, str | int] | None = None  # of the first one: name, file, line, text


# ---- two runs


class Played(NamedTuple):
    """Both runs of a workload, and the result of their comparison."""

    workload: str
    theirs: Recorded
    yours: Recorded
    verdict: Verdict


def workloads(stage: Stage) -> tuple[str, ...]:
    """Return the workloads to play in turn: the page's requests, and those with traps, if the stage has any."""
    return ("page", "traps") if stage.key in TRAPS else ("page",)


def play(stage: Stage, folder: Path) -> Played:
    """Play the workloads up to the first one in which the exercise parts from the stage."""
    played: list[Played] = []
    for workload in workloads(stage):
        theirs, yours = record_both(stage, folder, workload)
        played.append(Played(workload, theirs, yours, compare(stage, theirs, yours)))
        if not played[-1].verdict.is_same:
            return played[-1]
    shown = next((each for each in played if each.verdict.lines), played[0])  # its blocks have other numbers
    lines = shown.verdict.lines
    for workload, theirs, *_ in played:
        if workload != shown.workload:
            which = "the page's requests" if workload == "page" else "requests on which typical mistakes show"
            lines += (f"So are {theirs.events[-1]['step']} steps with {which}.",)
    return shown._replace(verdict=replace(shown.verdict, lines=lines))


def record_both(stage: Stage, folder: Path, workload: str) -> tuple[Recorded, Recorded]:
    """Record the stage and the exercise at the same time."""
    with tempfile.TemporaryDirectory() as temporary:
        targets = [Path(temporary, name) for name in ("theirs", "yours")]
        processes = [start(stage, *each, workload) for each in zip((stage.folder, folder), targets, strict=True)]
        theirs, yours = [finish(*each) for each in zip(processes, targets, strict=True)]
    if theirs.crash:
        raise ChainError(f"stage {stage.number} itself does not run: {theirs.crash.error}")
    return theirs, yours


def functions_to_write(stage: Stage) -> list[str]:
    """Return the names of the exercise's functions."""
    return [name.name for step in stage.steps for name in step.functions]


def start(stage: Stage, folder: Path, target: Path, workload: str) -> "subprocess.Popen[bytes]":
    arguments = [stage.key, str(folder), str(target), workload, *functions_to_write(stage)]
    command = [sys.executable, "-m", "notebooks.page.worker", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment)


def finish(process: "subprocess.Popen[bytes]", target: Path) -> Recorded:
    """Wait for a run, and read its events and how it ended."""
    crash: Crash | None = None
    try:
        if status := process.wait(SECONDS):
            crash = Crash(f"Python ended with status {status}")
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        crash = Crash(f"the run did not end in {SECONDS} seconds")
    written = target.read_text(encoding="utf-8") if target.exists() else ""
    lines = [json.loads(line) for line in written.split("\n")[:-1]]  # a process that was killed may leave half a line
    if lines and "crash" in lines[-1]:
        last = lines.pop()
        crash = Crash(last["crash"], last["place"], last["function"], last["told"], last["ran"])
    if crash and lines and (lines[-1]["kind"] != "step" or lines[-1]["error"] is None):
        step = sum(line["kind"] == "step" for line in lines) + 1
        lines.append({"kind": "step", "step": step, "error": crash.error, "function": None})
    return Recorded(tidy(lines), crash)


# ---- the comparison


def compare(stage: Stage, theirs: Recorded, yours: Recorded) -> Verdict:
    """Compare the run of a stage with that of an exercise on it."""
    if yours.crash:
        num_steps = max(1, yours.events[-1]["step"] if yours.events else 1)
        before, so_far = (up_to(run.events, num_steps - 1) for run in (theirs, yours))
        if not yours.events or not difference(before, so_far, key_without_blocks):
            return crashed(stage, theirs, yours, num_steps)
    decisive = difference(theirs.events, yours.events, key_without_blocks)
    first = difference(theirs.events, yours.events, key)
    if decisive and first:
        impossible = first_impossible(stage, yours.events, first.step)
        return parted(stage, first, has_same_tokens(theirs.events, yours.events), impossible)
    num_steps = theirs.events[-1]["step"]
    if first is None:
        return Verdict(num_steps, f"All {num_steps} steps are the same as stage {stage.number}'s.", is_same=True)
    line = (
        f"From step {first.step} on, your requests hold other blocks than stage {stage.number}'s. "
        f"Any free block serves: that is fine as long as make check STAGE={stage.number} is green."
    )
    return Verdict(num_steps, f"The same tokens and decisions in all {num_steps} steps.", (line,), is_same=True)


def difference(theirs: list[Event], yours: list[Event], key: Callable[[Event], Any]) -> Difference | None:
    """Return the first step whose events differ, in whatever order; `key` says what makes two events the same."""
    pairs = zip_longest(steps(theirs), steps(yours), fillvalue=list[Event]())
    for number, (one, other) in enumerate(pairs, 1):
        only_one, only_other = surplus(one, other, key), surplus(other, one, key)
        if only_one or only_other:
            return Difference(number, only_one, only_other)
    return None


def surplus(one: list[Event], other: list[Event], key: Callable[[Event], Any]) -> list[Event]:
    """Return the events that `one` has beyond those of `other`, in order."""
    rest, result = Counter(map(key, other)), []
    for event in one:
        if rest[key(event)]:
            rest[key(event)] -= 1
        else:
            result.append(event)
    return result


def steps(events: Iterable[Event]) -> Iterator[list[Event]]:
    """Yield the events of each step, with the text that a hash stands for in place of the hash.

    A load may be collected before or after the next step is scheduled, so its arrival is left out.
    """
    step: list[Event] = []
    for event in with_texts(events):
        if event["kind"] != "arrived":
            step.append(event)
        if event["kind"] == "step":
            yield step
            step = []


def has_same_tokens(theirs: list[Event], yours: list[Event]) -> bool:
    """Return whether the runs give every sequence the same tokens. One that is aborted may have got fewer."""
    one, other = tokens(theirs), tokens(yours)
    aborted = {event["seq"] for event in [*theirs, *yours] if event["kind"] == "end" and event["why"] == "abort"}
    return one.keys() == other.keys() and all(
        all(a == b for a, b in zip(one[seq], other[seq], strict=False))
        and (len(one[seq]) == len(other[seq]) or seq in aborted)
        for seq in one
    )


def tokens(events: list[Event]) -> dict[str, list[int]]:
    result: dict[str, list[int]] = {event["seq"]: [] for event in events if event["kind"] == "arrive"}
    for event in events:
        if event["kind"] == "token" and event["seq"] in result:
            result[event["seq"]].append(event["token"])
    return result


def with_texts(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events, each hash replaced by the tokens of the first text that was cached under it."""
    state: State | None = None
    texts: dict[str, str] = {}
    for event in events:
        if event["kind"] in ("snapshot", "pools"):  # pools: after a crash
            state = begin(event) if event["kind"] == "snapshot" else state
            continue
        assert state, "a run begins with a snapshot"
        if event["kind"] == "cached":
            texts.setdefault(event["hash"], text_of(state, event["block"]) or event["hash"])
        yield event | {"hash": texts.get(event["hash"], event["hash"])} if "hash" in event else event
        try_to_apply(state, event)


def text_of(state: State, block: int) -> str:
    """Return the tokens of a cached block and of all before it."""
    for seq in state.sequences.values():
        if block in seq.block_table:
            end = (seq.block_table.index(block) + 1) * state.pool["block_size"]
            return " ".join(map(str, seq.tokens[:end]))
    return ""


def try_to_apply(state: State, event: Event) -> bool:
    """Change `state` by an event, and return True; return False if it cannot have happened."""
    num_blocks = max(state.pool["num_blocks"], (state.host or {}).get("num_blocks", 0))
    blocks = [event[name] for name in BLOCKS if name in event and not isinstance(event[name], str)]
    if not all(isinstance(block, int) and 0 <= block < num_blocks for block in blocks):
        return False
    if event["kind"] == "reserved" and not 0 <= event["start"] < event["end"] <= num_blocks:
        return False
    try:
        apply(state, event)
    except (KeyError, IndexError, ValueError, TypeError):
        return False
    return True


def first_impossible(stage: Stage, events: list[Event], last: int) -> Event | None:
    """Return the first event up to step `last` that a function of the exercise told and that cannot have happened."""
    names = functions_to_write(stage)
    snapshot, *rest = up_to(events, last)
    state = begin(snapshot)
    impossible = (event for event in rest if event["kind"] != "step" and not try_to_apply(state, event))
    return next((event for event in impossible if event.get("told") and event.get("by") in names), None)


def key(event: Event) -> Any:
    """Return all that two events of the same step must share to be the same."""
    skipped = {*NOT_COMPARED, "why"} if event["kind"] in ("refused", "held_up") else NOT_COMPARED
    fields = [name for name in KEYS[event["kind"]] if name in event and name not in skipped]
    return event["kind"], *(json.dumps(event[name]) for name in fields)


def key_without_blocks(event: Event) -> Any:
    """Return the same without block numbers: a pool that hands out its blocks in another order is as good."""
    return key({name: value for name, value in event.items() if name not in BLOCKS or isinstance(value, str)})


# ---- the verdict, in words


def parted(stage: Stage, first: Difference, has_same_tokens: bool, impossible: Event | None) -> Verdict:
    events, look_at = [*first.theirs, *first.yours], functions_of(stage, first)
    tokens = "Every request still gets the same tokens" if has_same_tokens else "Some requests get other tokens"
    as_good = ", so your way may be as good" if has_same_tokens and not impossible else ""
    lines = [
        f"Stage {stage.number}: {in_words(first.theirs)}.",
        f"Yours: {in_words(first.yours)}.",
        f"{tokens}{as_good}: try make check STAGE={stage.number}.",
    ]
    if impossible:
        lines.append(misreported(stage, impossible["by"], impossible["told"], words=in_words([impossible])))
        look_at = (impossible["by"], *(name for name in look_at if name != impossible["by"]))
    return Verdict(
        first.step,
        f"In step {first.step}, your run parts from stage {stage.number}'s.",
        tuple(lines),
        blocks=tuple(dict.fromkeys(block for event in events for block in device_blocks(event))),
        seqs=tuple(dict.fromkeys(event["seq"] for event in events if "seq" in event)),
        look_at=look_at,
    )


def crashed(stage: Stage, theirs: Recorded, yours: Recorded, step: int) -> Verdict:
    title, crash = f"Your code stops in step {step}.", yours.crash
    assert crash, "it has not crashed"
    place, lines, look_at = crash.place, [crash.error], [crash.function] if crash.function else []
    names = functions_to_write(stage)
    if place:
        function = place["function"]
        if crash.told and function not in names and (told := told_before(theirs, yours, step, function, names)):
            return Verdict(step, title, (misreported(stage, *told),), look_at=(told[0],))
        where = f", {function}" if function not in ("", "<module>") else ""
        is_given = function not in names and function in all_excerpts(stage.folder)
        given = "in the given code: " if is_given else ""
        lines.append(f"{given}exercises/{stage.key}/{place['file']}, line {place['line']}{where}")
        if crash.told and function in names:
            lines.append(misreported(stage, function, crash.told))
        if not look_at and is_given and crash.ran:
            lines.append(f"Your functions that ran last before it: {', '.join(crash.ran)}.")
            look_at = [*crash.ran]
        look_at = look_at or ([function] if function else [])
    return Verdict(step, title, tuple(lines), look_at=tuple(look_at))


def told_before(
    theirs: Recorded, yours: Recorded, step: int, function: str, names: list[str]
) -> tuple[str, str, bool] | None:
    """Return which function of the exercise told the observer something wrong, or nothing, before `function` told it.

    Return the kind of event, too, and whether it was told at all. Return None if the same was told as in the stage.
    """
    one, other = (next(islice(steps(run.events), step - 1, None), list[Event]()) for run in (theirs, yours))
    one = list(takewhile(lambda event: event.get("by") != function, one))
    missing, extra = (
        [(event["by"], event["told"]) for event in surplus(*runs, key_without_blocks) if event.get("by") in names]
        for runs in ((one, other), (other, one))
    )
    return (*missing[0], missing[0] in extra) if missing else None


def misreported(stage: Stage, function: str, told: str, is_told: bool = True, words: str = "") -> str:
    """Return a line about an event that the observer is told in a way that makes no sense, or is not told."""
    line = f'{function} does not tell the observer "{told}" here'
    if is_told:
        line = f'The "{told}" that {function} tells the observer cannot be replayed{words and f": {words}"}'
    return f"{line}. exercises/{stage.key}/observer.py explains it."


def in_words(events: list[Event]) -> str:
    """Return the most telling events as a phrase."""
    known = sorted((event for event in events if event["kind"] in WORDS), key=rank)
    words = [WORDS[event["kind"]].format_map(with_labels(event)) for event in known]
    more = f", and {len(words) - MAX_WORDS} more" if len(words) > MAX_WORDS else ""
    return "; ".join(words[:MAX_WORDS]) + more if words else "nothing of the kind"


def rank(event: Event) -> int:
    """Return a small number for an event that tells much about the cause of a difference."""
    return [*LOOK_AT, event["kind"]].index(event["kind"])


def with_labels(event: Event) -> Event:
    """Return an event with the page's names for its sequences."""
    names = (*SEQUENCES, "from") if isinstance(event.get("from"), str) else SEQUENCES
    return {name: label(value) if name in names and value else value for name, value in event.items()}


def device_blocks(event: Event) -> Iterator[int]:
    """Yield the blocks of the device that an event is about."""
    of_host = {"stored": "to", "renewed": "to", "host_evicted": "block", "loaded": "from", "arrived": "from"}
    names = [name for name in BLOCKS if name != of_host.get(event["kind"])]
    yield from (event[name] for name in names if isinstance(event.get(name), int))


def functions_of(stage: Stage, first: Difference) -> tuple[str, ...]:
    """Return the functions of the exercise to look at, the likeliest first."""
    names = functions_to_write(stage)
    cause = min([*first.theirs, *first.yours], key=rank)
    running = cause["by"] if cause.get("by") in names else cause.get("function")
    parts = LOOK_AT.get(cause["kind"], ())
    kinds = [Counter(event["kind"] for event in run if event["kind"] in ADMISSION) for run in first[1:]]
    if cause["kind"] in ADMISSION and kinds[0] == kinds[1]:  # of other requests: the queue has another order
        running, parts = None, ("_preempt", *parts)
    elif {event["kind"] for event in first.theirs} == {"held_up"} and not first.yours:
        running, parts = None, ("schedule",)  # the same decisions: the observer was not told of them
    likely = [name for part in parts for name in names if name.rpartition(".")[2] == part]
    found = likely if cause["kind"] in RECORDERS or not running else [running, *likely]
    return tuple(dict.fromkeys(found or names))


# ---- the page


def build(stage: Stage, folder: Path, target: Path) -> Verdict:
    """Record and compare both runs, and write the page with the exercise's tab.

    If the requests are not the page's, the stage's tab shows its run of them, too.
    """
    workload, theirs, yours, verdict = play(stage, folder)
    sources = all_excerpts(folder)
    if verdict.look_at and (source := sources.get(verdict.look_at[0])):
        verdict = replace(verdict, source={"name": verdict.look_at[0], **source})
    content = load(PAGE)
    packer = Packer(content["strings"])
    idea = f"Your own code, with the requests that stage {stage.number} has in the tab beside it."
    events = playable(yours.events or theirs.events[:1], verdict.step)
    run = tab(NAME, f"exercises/{stage.key}", idea, sources, events, packer) | {"verdict": asdict(verdict)}
    place = [each["name"] for each in content["runs"]].index(stage.key)
    content["runs"].insert(place + 1, run)
    if workload != "page":
        title, idea = STAGES[stage.key]
        idea += " Here it has other requests than in the other tabs: typical mistakes show on these."
        content["runs"][place] = tab(stage.key, title, idea, all_excerpts(stage.folder), theirs.events, packer)
    target.write_text(page(content | {"strings": packer.strings}), encoding="utf-8")
    return verdict


def tab(
    name: str, title: str, idea: str, sources: dict[str, Excerpt], events: list[Event], packer: Packer
) -> dict[str, Any]:
    """Return the data of a tab, whose moments nobody has looked for."""
    snapshot, *rest = events
    return {
        "name": name,
        "title": title,
        "idea": idea,
        "moments": [],
        "sources": {each: sources[each] for each in sorted(sources.keys() & {event.get("by") for event in rest})},
        "snapshot": snapshot,
        "events": packer.pack(rest),
    }


def playable(events: list[Event], last: int) -> list[Event]:
    """Return the events up to step `last`, without those that cannot have happened: a page could not play them."""
    snapshot, *rest = up_to(events, last)
    state, result = begin(snapshot), [snapshot]
    result += [event for event in rest if event["kind"] == "step" or try_to_apply(state, event)]
    if result[-1]["kind"] != "step":  # it crashed before the first step
        result.append({"kind": "step", "step": last, "error": None})
    return result


def up_to(events: list[Event], last: int) -> list[Event]:
    return [event for event in events if event["step"] <= last]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m notebooks.page.play", description=__doc__)
    parser.add_argument("stage", help="2, s2 or s2_block_manager")
    parser.add_argument("--no-browser", action="store_true", help="write the page without opening it")
    options = parser.parse_args(arguments)
    try:
        stage = load_chain(ROOT).stage(options.stage)
        step_of(stage, 1)  # raises for a stage without an exercise
        if stage.key not in STAGES:
            raise ChainError(f"the page has no branches: play works for stages 1 to {len(STAGES)}")
        folder = exercise_folder(stage)
        if not folder.is_dir():
            raise ChainError(f"there is no exercises/{stage.key} yet: make exercise STAGE={stage.number} writes it")
        target = folder.with_suffix(".html")
        verdict = build(stage, folder, target)
    except ChainError as error:
        print(f"play: {error}", file=sys.stderr)
        return 2
    print("\n".join([verdict.title, *(f"  {line}" for line in verdict.lines)]))
    if verdict.look_at:
        print(f"  Look at {', '.join(verdict.look_at)}.")
    print(target.relative_to(ROOT))
    if not options.no_browser:
        webbrowser.open_new_tab(target.as_uri())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
