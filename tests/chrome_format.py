"""A checker of the Trace Event Format, which chrome://tracing and ui.perfetto.dev read, for the phases that we use."""

from collections import defaultdict
from typing import Any

KEYS = {  # by phase: the keys that an event must and may have, besides its name
    "M": ({"pid", "tid", "args"}, {"ts"}),
    "X": ({"pid", "tid", "ts", "dur"}, {"cat", "args"}),
    "C": ({"pid", "tid", "ts", "args"}, {"cat"}),
    "b": ({"pid", "tid", "ts", "id", "cat"}, {"args"}),
    "e": ({"pid", "tid", "ts", "id", "cat"}, {"args"}),
    "s": ({"pid", "tid", "ts", "id", "cat"}, {"args"}),
    "f": ({"pid", "tid", "ts", "id", "cat", "bp"}, {"args"}),
}


def check_format(trace: dict[str, Any]) -> None:
    assert trace.keys() == {"traceEvents", "displayTimeUnit"} and trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    for event in events:
        check_event(event)
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times), "events must be in order of time"
    check_names(events)
    check_nesting([event for event in events if event["ph"] == "X"])
    check_pairs(events)
    check_arrows(events)


def check_event(event: dict[str, Any]) -> None:
    must, may = KEYS[event["ph"]]
    assert isinstance(event["name"], str) and event["name"], event
    assert must <= event.keys() - {"name", "ph"} <= must | may, event
    for key in ("pid", "tid", "ts", "dur", "id"):
        assert type(event.get(key, 0)) is int and event.get(key, 0) >= 0, event  # whole microseconds
    assert isinstance(event.get("cat", "-"), str) and isinstance(event.get("args", {}), dict), event
    if event["ph"] == "C":
        assert event["args"] and all(type(value) in (int, float) and value >= 0 for value in event["args"].values())
    if event["ph"] == "M":
        assert event["name"] in ("process_name", "thread_name") and isinstance(event["args"]["name"], str), event


def check_names(events: list[dict[str, Any]]) -> None:
    """Check that exactly the threads in use have a name."""
    named = [(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"]
    assert len(named) == len({*named})
    assert {(event["pid"], event["tid"]) for event in events} == {*named}


def check_nesting(slices: list[dict[str, Any]]) -> None:
    """Check that the slices of a thread do not overlap."""
    ends: dict[tuple[int, int], int] = defaultdict(int)
    for each in slices:
        thread = each["pid"], each["tid"]
        assert each["ts"] >= ends[thread], f"the slice begins before the previous one ends: {each}"
        ends[thread] = each["ts"] + each["dur"]


def check_pairs(events: list[dict[str, Any]]) -> None:
    open_: set[tuple[str, int]] = set()
    for event in events:
        key = event.get("cat"), event.get("id")
        if event["ph"] == "b":
            assert key not in open_, f"an event that is open begins again: {event}"
            open_.add(key)
        elif event["ph"] == "e":
            open_.remove(key)
    assert not open_, f"events never end: {open_}"


def check_arrows(events: list[dict[str, Any]]) -> None:
    """Check that the ends of each arrow are in order, and in slices of their threads: viewers draw no others."""
    slices, starts = [event for event in events if event["ph"] == "X"], {}
    for event in events:
        if event["ph"] in ("s", "f"):
            thread, at = (event["pid"], event["tid"]), event["ts"]
            is_in = [
                each["ts"] <= at <= each["ts"] + each["dur"] for each in slices if (each["pid"], each["tid"]) == thread
            ]
            assert any(is_in), f"an arrow ends outside all slices: {event}"
        if event["ph"] == "s":
            assert event["id"] not in starts
            starts[event["id"]] = event["ts"]
        elif event["ph"] == "f":
            assert event["bp"] == "e" and starts.pop(event["id"]) <= event["ts"]
    assert not starts, "an arrow has no end"
