"""Replay: rebuild the engine's state after each step from events alone. The page's reducer works the same way."""

import copy
from collections.abc import Callable, Iterable, Iterator
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
    carried_by: str | None = None  # the sequence that computes its prompt; until then it is in no queue
    num_computed_tokens: int = 0
    block_table: list[int | None] = field(default_factory=list)  # None only until the event for this index comes
    slots: tuple[int, int] | None = None  # stage 1: start and end


@dataclass
class State:
    """The state of an engine: its sequences, queues, pools and indexes."""

    pool: dict[str, Any]  # as in the snapshot
    host: dict[str, Any] | None
    step: int = 0
    sequences: dict[str, SequenceState] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)  # in order
    running: list[str] = field(default_factory=list)
    ref_counts: list[int] = field(default_factory=list)  # for each block, the number of tables that hold it
    free: list[int] = field(default_factory=list)  # in the queue's order
    cached: dict[int, str] = field(default_factory=dict)  # the hash of each cached block
    host_ref_counts: list[int] = field(default_factory=list)  # for each block of the host, the number of loads
    host_free: list[int] = field(default_factory=list)
    host_cached: dict[int, str] = field(default_factory=dict)
    loading: dict[int, int] = field(default_factory=dict)  # from blocks of the host to blocks of the device

    @property
    def idle(self) -> list[int]:
        """The blocks that are free but cached."""
        return [block for block in self.free if block in self.cached]


def begin(snapshot: Event) -> State:
    """Return the state in a snapshot. Its dictionaries have strings as keys, as JSON requires."""
    initial = snapshot["state"]
    sequences = {each["seq"]: SequenceState(**copy.deepcopy(each)) for each in initial["sequences"]}
    state = State(snapshot["pool"], snapshot["host"], snapshot["step"], sequences)
    for name in ("waiting", "running", "ref_counts", "free", "host_ref_counts", "host_free"):
        setattr(state, name, list(initial[name]))
    for name in ("cached", "host_cached", "loading"):
        setattr(state, name, {int(block): value for block, value in initial[name].items()})
    return state


def apply(state: State, event: Event) -> State:
    """Change `state` by one event, and return it. Ignore events that change nothing, such as "refused"."""
    if event["kind"] in CHANGES:
        CHANGES[event["kind"]](state, event)
    return state


def states(events: Iterable[Event]) -> Iterator[State]:
    """Yield the state after each step. It is always the same object."""
    events = iter(events)
    state = begin(next(events))
    for event in events:
        apply(state, event)
        if event["kind"] == "step":
            yield state


# Sequences


def arrive(state: State, event: Event) -> None:
    state.sequences[event["seq"]] = SequenceState(
        seq=event["seq"],
        request=event["request"],
        tokens=list(event["tokens"]),
        texts=list(event["texts"]),
        max_num_tokens=event["max_num_tokens"],
        carried_by=event["carried_by"],
    )
    if event["carried_by"] is None:
        state.waiting.append(event["seq"])


def admit(state: State, event: Event) -> None:
    state.waiting.remove(event["seq"])
    state.running.append(event["seq"])
    state.sequences[event["seq"]].num_computed_tokens = event["num_computed_tokens"]


def forked(state: State, event: Event) -> None:
    seq = state.sequences[event["seq"]]
    seq.carried_by, seq.num_computed_tokens = None, state.sequences[event["from"]].num_computed_tokens
    state.running.insert(state.running.index(event["behind"]) + 1, event["seq"])


def chunk(state: State, event: Event) -> None:
    state.sequences[event["seq"]].num_computed_tokens = event["end"]


def token(state: State, event: Event) -> None:
    seq = state.sequences[event["seq"]]
    seq.tokens.append(event["token"])
    seq.texts.append(event["text"])


def preempt(state: State, event: Event) -> None:
    state.sequences[event["seq"]].num_computed_tokens = 0
    state.running.remove(event["seq"])
    state.waiting.insert(0, event["seq"])


def end(state: State, event: Event) -> None:
    del state.sequences[event["seq"]]
    for queue in (state.waiting, state.running):
        if event["seq"] in queue:  # a carried sequence is in no queue
            queue.remove(event["seq"])


def step(state: State, event: Event) -> None:
    state.step = event["step"]


# Their slots and blocks


def reserved(state: State, event: Event) -> None:
    state.sequences[event["seq"]].slots = event["start"], event["end"]


def released(state: State, event: Event) -> None:
    state.sequences[event["seq"]].slots = None


def held(state: State, event: Event) -> None:
    """Apply "taken", "shared" or "hit": add a holder, and put the block in its table."""
    block, place, table = event["block"], event["index"], state.sequences[event["seq"]].block_table
    if block in state.free:
        state.free.remove(block)
    state.ref_counts[block] += 1
    table.extend([None] * (place + 1 - len(table)))
    table[place] = block


def given_back(state: State, event: Event) -> None:
    block, table = event["block"], state.sequences[event["seq"]].block_table
    state.ref_counts[block] -= 1
    if block in table:  # unless its copy has replaced it
        table[table.index(block)] = None
    while table and table[-1] is None:
        table.pop()


def free(state: State, event: Event) -> None:
    state.free.insert(0, event["block"])


def idle(state: State, event: Event) -> None:
    state.free.append(event["block"])


# The two tiers


def cached(state: State, event: Event) -> None:
    state.cached[event["block"]] = event["hash"]


def evicted(state: State, event: Event) -> None:
    del state.cached[event["block"]]


def stored(state: State, event: Event) -> None:
    state.host_cached[event["to"]] = event["hash"]
    renewed(state, event)


def renewed(state: State, event: Event) -> None:
    state.host_free.remove(event["to"])
    state.host_free.append(event["to"])


def host_evicted(state: State, event: Event) -> None:
    del state.host_cached[event["block"]]


def loaded(state: State, event: Event) -> None:
    """Apply "loaded": until it has arrived, the load holds both blocks."""
    state.host_ref_counts[event["from"]] += 1
    state.ref_counts[event["to"]] += 1
    state.host_free.remove(event["from"])
    state.loading[event["from"]] = event["to"]


def arrived(state: State, event: Event) -> None:
    block = event["from"]
    state.host_ref_counts[block] -= 1
    state.ref_counts[event["to"]] -= 1
    state.host_free.insert(len(state.host_free) if block in state.host_cached else 0, block)
    del state.loading[block]


def pools(state: State, event: Event) -> None:
    """Replace both queues and both indexes after a failed step."""
    state.free, state.host_free = list(event["free"]), list(event["host_free"])
    for name in ("cached", "host_cached"):
        setattr(state, name, {int(block): block_hash for block, block_hash in event[name].items()})


APPLIED_BY_NAME = (
    *(arrive, admit, forked, chunk, token, preempt, end, step, reserved, released, given_back, free, idle),
    *(cached, evicted, stored, renewed, host_evicted, loaded, arrived, pools),
)
CHANGES: dict[str, Callable[[State, Event], None]] = {change.__name__: change for change in APPLIED_BY_NAME}
CHANGES |= dict.fromkeys(("taken", "shared", "hit"), held)
