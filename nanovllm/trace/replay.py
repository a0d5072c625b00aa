"""Replay: rebuild the engine's state after each step from the events only. server/page/reducer.js does the same."""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .events import Event


@dataclass
class SequenceState:
    """A sequence that has arrived and has not ended."""

    seq: str
    request: str
    tokens: list[int]
    texts: list[str]
    max_num_tokens: int
    carried_by: str | None = None  # computes this one's prompt; until the fork, this one is in no queue
    num_computed_tokens: int = 0
    block_table: list[int | None] = field(default_factory=list)  # None until the event for this index comes
    slots: tuple[int, int] | None = None  # in stage 1, instead of blocks: start and end


ARRIVE_KEYS = ("seq", "request", "tokens", "texts", "max_num_tokens", "carried_by")  # of an "arrive" event


@dataclass
class State:
    """The state of an engine: its sequences, queues, pools and indexes."""

    pool: dict[str, Any]  # as in the snapshot
    host: dict[str, Any] | None
    step: int = 0
    sequences: dict[str, SequenceState] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)  # in order
    running: list[str] = field(default_factory=list)
    ref_counts: list[int] = field(default_factory=list)  # for each block, the tables and loads that hold it
    free: list[int] = field(default_factory=list)  # in the queue's order
    cached: dict[int, str] = field(default_factory=dict)  # the hash of each cached block
    host_ref_counts: list[int] = field(default_factory=list)  # for each block of the host, the loads that hold it
    host_free: list[int] = field(default_factory=list)
    host_cached: dict[int, str] = field(default_factory=dict)
    loading: dict[int, int] = field(default_factory=dict)  # by host block, the device block that it is copied to
    disk_loading: list[int] = field(default_factory=list)  # device blocks that are being read from the disk

    @property
    def idle(self) -> list[int]:
        """The blocks that are free but cached."""
        return [block for block in self.free if block in self.cached]


def begin(snapshot: Event) -> State:
    """Return the state in a snapshot, whose dictionaries have strings as keys, as JSON requires."""
    initial = snapshot["state"]
    sequences = {each["seq"]: SequenceState(**copy.deepcopy(each)) for each in initial["sequences"]}
    state = State(snapshot["pool"], snapshot["host"], snapshot["step"], sequences)
    for name in ("waiting", "running", "ref_counts", "free", "host_ref_counts", "host_free"):
        setattr(state, name, list(initial[name]))
    for name in ("cached", "host_cached", "loading"):
        setattr(state, name, {int(block): value for block, value in initial[name].items()})
    state.disk_loading = list(initial.get("disk_loading", []))  # only with a disk
    return state


def apply(state: State, event: Event) -> State:
    """Apply one event to `state`, and return it. Ignore events that change nothing, such as "refused"."""
    match event["kind"]:
        case "step":
            state.step = event["step"]
        case "pools":  # both queues and both indexes, after a failed step
            state.free, state.host_free = list(event["free"]), list(event["host_free"])
            for name in ("cached", "host_cached"):
                setattr(state, name, {int(block): block_hash for block, block_hash in event[name].items()})

        # A block of the device
        case "free":
            state.free.insert(0, event["block"])
        case "idle":
            state.free.append(event["block"])
        case "cached":
            state.cached[event["block"]] = event["hash"]
        case "evicted":
            del state.cached[event["block"]]

        # A block of the host
        case "stored" | "renewed" as kind:
            state.host_free.remove(event["to"])
            state.host_free.append(event["to"])
            if kind == "stored":
                state.host_cached[event["to"]] = event["hash"]
        case "host_evicted":
            del state.host_cached[event["block"]]
        case "loaded":  # until it has arrived, the load holds both blocks
            state.host_ref_counts[event["from"]] += 1
            state.ref_counts[event["to"]] += 1
            state.host_free.remove(event["from"])
            state.loading[event["from"]] = event["to"]
        case "arrived":
            block = event["from"]
            state.host_ref_counts[block] -= 1
            state.ref_counts[event["to"]] -= 1
            state.host_free.insert(len(state.host_free) if block in state.host_cached else 0, block)
            del state.loading[block]

        # A block of the disk, which has no number
        case "disk_loaded":
            state.ref_counts[event["to"]] += 1
            state.disk_loading.append(event["to"])
        case "disk_arrived" | "lost":
            state.ref_counts[event["to"]] -= 1
            state.disk_loading.remove(event["to"])

        # A sequence
        case "arrive":
            fields = {key: copy.copy(event[key]) for key in ARRIVE_KEYS}
            state.sequences[event["seq"]] = SequenceState(**fields)
            if event["carried_by"] is None:
                state.waiting.append(event["seq"])
        case "end":
            del state.sequences[event["seq"]]
            for queue in (state.waiting, state.running):
                if event["seq"] in queue:  # a carried sequence is in no queue
                    queue.remove(event["seq"])
        case _ if "seq" in event:
            change_sequence(state, state.sequences[event["seq"]], event)
    return state


def change_sequence(state: State, seq: SequenceState, event: Event) -> None:
    """Apply an event to `seq`, its sequence, and to the queues or blocks that it changes."""
    match event["kind"]:
        case "admit":
            state.waiting.remove(seq.seq)
            state.running.append(seq.seq)
            seq.num_computed_tokens = event["num_computed_tokens"]
        case "forked":
            seq.carried_by, seq.num_computed_tokens = None, state.sequences[event["from"]].num_computed_tokens
            state.running.insert(state.running.index(event["behind"]) + 1, seq.seq)
        case "chunk":
            seq.num_computed_tokens = event["end"]
        case "token":
            seq.tokens.append(event["token"])
            seq.texts.append(event["text"])
        case "preempt":
            seq.num_computed_tokens = 0
            state.running.remove(seq.seq)
            state.waiting.insert(0, seq.seq)
        case "reserved":
            seq.slots = event["start"], event["end"]
        case "released":
            seq.slots = None
        case "taken" | "shared" | "hit":
            block, index = event["block"], event["index"]
            if block in state.free:
                state.free.remove(block)
            state.ref_counts[block] += 1
            seq.block_table += [None] * (index + 1 - len(seq.block_table))
            seq.block_table[index] = block
        case "given_back":
            block, table = event["block"], seq.block_table
            state.ref_counts[block] -= 1
            if block in table:  # a copy may have replaced the block in the table
                table[table.index(block)] = None
            while table and table[-1] is None:
                table.pop()


def states(events: Iterable[Event]) -> Iterator[State]:
    """Yield the state after each step. It is always the same object, which changes in place."""
    events = iter(events)
    state = begin(next(events))
    for event in events:
        apply(state, event)
        if event["kind"] == "step":
            yield state
