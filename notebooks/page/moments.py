"""The moments that a reader should not miss: found in the recorded runs, never placed by hand.

A moment is a question before a step and what the step shows. Which answer is right comes from the events.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from nanovllm.trace import State
from notebooks.page.record import Run, Step, label
from notebooks.page.workload import BLOCK_SIZE

Finder = Callable[[Run], "Moment | None"]


@dataclass(frozen=True)
class Moment:
    step: int  # the step that shows it; the question is asked before it
    title: str
    sentence: str  # what there is to know before the step
    question: str
    answers: tuple[str, str]
    right: int
    reveal: str
    block: int | None = None  # to look at


class Found(NamedTuple):
    stage: str
    find: Finder


FINDERS: list[Found] = []


def moment(stage: str) -> Callable[[Finder], Finder]:
    """The function finds a moment of this stage; it returns None if the run has none."""

    def register(find: Finder) -> Finder:
        FINDERS.append(Found(stage, find))
        return find

    return register


def moments(stage: str, run: Run) -> list[dict[str, Any]]:
    """All moments of a stage, in order of time. Raises ValueError for one that the run does not have."""
    found = []
    for _, find in (each for each in FINDERS if each.stage == stage):
        one = find(run)
        if one is None:
            raise ValueError(f"{stage}: no step has the moment {find.__name__}")
        found.append(one)
    return [asdict(one) for one in sorted(found, key=lambda one: one.step)]


def blocks(count: int) -> str:
    """
    >>> blocks(1), blocks(2)
    ('1 block', '2 blocks')
    """
    return f"{count} block{'s' * (count != 1)}"


# ---- stage 1


def free_pieces(state: State) -> list[tuple[int, int]]:
    """(start, end) of each free piece of stage 1's pool."""
    held = sorted(seq.slots for seq in state.sequences.values() if seq.slots)
    starts, ends = [0, *(end for _, end in held)], [*(start for start, _ in held), state.pool["num_blocks"]]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if end > start]


@moment("s1")
def free_but_scattered(run: Run) -> Moment | None:
    for step in run.steps:
        sizes = [end - start for start, end in free_pieces(step.after)]
        first = step.after.waiting[0] if step.after.waiting else None
        needed = step.after.sequences[first].max_num_tokens if first else 0
        if first and step.of("released") and max(sizes) < needed <= sum(sizes):
            ended = " and ".join(label(event["seq"]) for event in step.of("end"))
            return Moment(
                step.number,
                "Free, but not in one piece",
                f"{ended} ends in the next step. {sum(sizes)} slots will be free, and {label(first)} waits for {needed}.",
                f"Is there room for {label(first)} then?",
                (f"Yes: {sum(sizes)} are enough", f"No, though {sum(sizes)} are free"),
                int(max(sizes) < needed),
                f"The free slots lie in pieces of {' and '.join(map(str, sizes))}. Stage 1 needs {needed} side by side. "
                "(It also lets nobody in before the whole batch has ended: stage 4 cures that.)",
                step.of("released")[0]["start"] // BLOCK_SIZE,
            )
    return None


# ---- stages 2 and 3


@moment("s2")
def scattered_table(run: Run) -> Moment | None:
    for step in run.steps:
        for event in step.of("admit"):
            table = step.after.sequences[event["seq"]].block_table
            gaps = [b - a for a, b in zip(table, table[1:], strict=False)]
            if any(gap != 1 for gap in gaps):
                places = ", ".join(map(str, table))
                return Moment(
                    step.number,
                    "A table in place of a piece",
                    f"{label(event['seq'])} is next. The blocks that come first in the queue do not lie side by side.",
                    "Can one sequence have them?",
                    ("Yes, any blocks do", "No, it would have to wait"),
                    int(event["seq"] not in step.after.running),
                    f"Its block table says where its tokens are: blocks {places}. Follow the arrows.",
                    table[0],
                )
    return None


@moment("s2")
def seventeenth_token(run: Run) -> Moment | None:
    for step in run.steps:
        for event in step.of("taken", why="grow", index=16 // BLOCK_SIZE):
            who, block = label(event["seq"]), event["block"]
            num_taken = len(step.of("taken", seq=event["seq"]))
            return Moment(
                step.number,
                "The 17th token",
                f"{who} has 16 tokens: two blocks of {BLOCK_SIZE} are full to the last slot.",
                "What does its next token take?",
                ("One slot", f"A block of {BLOCK_SIZE} slots"),
                int(num_taken == 1),
                f"{who} takes block {block}: one slot is used, {BLOCK_SIZE - 1} are held and empty. "
                "That is all that it can waste, however long it gets.",
                block,
            )
    return None


@moment("s2")
def taken_again(run: Run) -> Moment | None:
    given_back: dict[int, str] = {}
    for step in run.steps:
        for event in step.of("taken", why="grow"):
            giver, taker, block = given_back.get(event["block"]), event["seq"], event["block"]
            if giver and giver != taker and step.before.running:
                return Moment(
                    step.number,
                    "Freed in the middle, taken again",
                    f"{label(giver)} gave its blocks back while others run. Now {label(taker)}'s last block is full.",
                    f"Which block does {label(taker)} take?",
                    (f"One that {label(giver)} gave back", "One that nobody has used"),
                    int(block not in given_back),
                    f"Block {block}, in the midst of the others: the block returned last is taken first.",
                    block,
                )
        given_back |= {event["block"]: event["seq"] for event in step.of("given_back")}
    return None


@moment("s3")
def promised_against_held(run: Run) -> Moment | None:
    for step in run.steps:
        for event in step.of("held_up", why="promise"):
            num_free, who = len(step.after.free), label(event["seq"])
            if num_free >= event["needed"]:
                num_blocks = step.after.pool["num_blocks"]
                promised = num_blocks - event["free"]
                return Moment(
                    step.number,
                    "Promised against held",
                    f"A new batch begins. After it {num_free} of {num_blocks} blocks are free; {who} may come to need "
                    f"{event['needed']}.",
                    f"Is {who} in the batch?",
                    ("No", f"Yes, {num_free} blocks are free"),
                    int(event["seq"] in step.after.running),
                    f"{promised} blocks are promised to the others, should they grow to their end, though only "
                    f"{num_blocks - num_free} are held. {promised} + {event['needed']} is more than {num_blocks}.",
                )
    return None


# ---- stage 4


def decodes(step: Step) -> list[str]:
    return [event["seq"] for event in step.of("chunk", why="decode")]


@moment("s4")
def chunk_beside_decodes(run: Run) -> Moment | None:
    for step in run.steps:
        for event in step.of("chunk", why="prefill"):
            who, size = label(event["seq"]), event["end"] - event["start"]
            seq = step.before.sequences.get(event["seq"])
            length = len(seq.tokens) if seq else 0
            if 1 < size < length and event["start"] == 0 and decodes(step):
                budget = run.events[0]["max_num_batched_tokens"]
                return Moment(
                    step.number,
                    "A chunk in a decode step",
                    f"{who}'s prompt has {length} tokens. A step computes at most {budget}, and others are to decode in it.",
                    f"How much of {who}'s prompt comes along?",
                    (f"{size} tokens, what is left of the step", f"All {length}, or none"),
                    int(size == length),
                    f"{' and '.join(map(label, decodes(step)))} decode a token each, {budget - size - len(decodes(step))} "
                    f"go to a prompt that was begun before, and {who} gets {size}. The other {length - size} come in the "
                    "next step: nobody stands still for a long prompt.",
                    step.after.sequences[event["seq"]].block_table[0],
                )
    return None


@moment("s4")
def seat_refilled(run: Run) -> Moment | None:
    seen: set[str] = set()  # a preempted sequence that comes back is another story
    for earlier, step in zip(run.steps, run.steps[1:], strict=False):
        seen |= set(earlier.after.running)
        for event in step.of("admit"):
            who, others = label(event["seq"]), step.before.running
            if earlier.of("end") and earlier.of("held_up", seq=event["seq"]) and others and event["seq"] not in seen:
                return Moment(
                    step.number,
                    "A seat is refilled",
                    f"{label(earlier.of('end')[0]['seq'])} has ended, {len(others)} others are in the middle of their "
                    f"texts, and {who} waits.",
                    f"When does {who} begin?",
                    ("In the next step", "When the others have ended"),
                    int(event["step"] != earlier.number + 1),
                    f"{who} is admitted at once, beside the others. In stages 1 to 3 it would wait for the whole batch.",
                    step.after.sequences[event["seq"]].block_table[0],
                )
    return None


@moment("s4")
def preemption(run: Run) -> Moment | None:
    for step in run.steps:
        for event in step.of("preempt", why="blocks"):
            first, victim = step.before.running[0], event["seq"]
            last = step.before.running[-1]
            table = step.before.sequences[victim].block_table
            tokens = step.before.sequences[victim].num_computed_tokens
            return Moment(
                step.number,
                "A preemption",
                f"{label(event['for'])} needs a block, and none is free.",
                "Who gives way?",
                (f"{label(first)}, which came first", f"{label(last)}, which came last"),
                int(victim == last),
                f"{label(victim)} gives back {blocks(len(table))}, and waits as the first in the queue. Its {tokens} "
                "computed tokens are lost: they will be computed again.",
                table[0],
            )
    return None


# ---- stage 5


@moment("s5")
def counts_and_copies(run: Run) -> Moment | None:
    for step in run.steps:
        copies = step.of("copied")
        if len(step.of("forked")) >= 2 and copies:
            source, samples = copies[0]["from"], 1 + len(step.of("forked"))
            shared = sorted({event["block"] for event in step.of("shared")})
            steady = [block for block in shared if step.after.ref_counts[block] == samples]
            return Moment(
                step.number,
                "Counts of 3, 2, 1, and the copy",
                f"F's prompt is computed, and {samples} samples begin. They share its {blocks(len(shared))}; the last "
                "one is not full, and each sample writes a token into it.",
                "How many copies of that block are made?",
                (f"{samples}, one for each sample", f"{samples - 1}, all but one"),
                int(len(copies) == samples - 1),
                f"Block {source} counts {samples} holders, then {samples - 1}, then 1: whoever is alone writes in place. "
                f"The {blocks(len(steady))} that are full keep a count of {samples}.",
                source,
            )
    return None


# ---- stage 6


def authors(run: Run) -> dict[str, tuple[str, int]]:
    """Of each cached text: in whose table it was computed first, and in which place."""
    found: dict[str, tuple[str, int]] = {}
    places: dict[int, tuple[str, int]] = {}  # of each block, by what happened to it last
    for event in run.events:
        if event["kind"] in ("taken", "hit", "shared"):
            places[event["block"]] = event["seq"], event["index"]
        elif event["kind"] == "cached":
            found.setdefault(event["hash"], places[event["block"]])
    return found


@moment("s6")
def held_then_idle(run: Run) -> Moment | None:
    for step in run.steps:
        idle = step.of("idle")
        if idle and step.of("end"):
            who = label(step.of("end")[0]["seq"])
            kept = [event["block"] for event in idle]
            return Moment(
                step.number,
                "Held, then idle",
                f"{who} gets its last token in the next step, and gives {blocks(len(step.of('given_back')))} back.",
                "What becomes of the text in them?",
                ("It stays, and can be found", "It is of no use any more"),
                int(not all(block in step.after.cached for block in kept)),
                f"{blocks(len(kept))} are idle: nobody holds them, but each can be found by the hash of its text. They "
                "go to the end of the queue, and are taken last.",
                kept[-1],
            )
    return None


@moment("s6")
def hit_by_a_stranger(run: Run) -> Moment | None:
    for step in run.steps:
        for event in step.of("hit", was="idle"):
            author, who = authors(run)[step.before.cached[event["block"]]][0], event["seq"]
            if author != who:
                hits = step.of("hit", seq=who)
                num_tokens, found = len(step.before.sequences[who].tokens), BLOCK_SIZE * len(hits)
                return Moment(
                    step.number,
                    "Found by a stranger",
                    f"{label(who)} is next. Its {num_tokens} tokens begin as {label(author)}'s did, which has ended.",
                    f"How many of them does {label(who)} compute?",
                    (f"All {num_tokens}", f"The last {num_tokens - found}"),
                    int(step.of("admit", seq=who)[0]["num_computed_tokens"] == found),
                    f"{blocks(len(hits))} of {label(author)} are found by their hashes and held again: {found} tokens "
                    "that need not be computed.",
                    event["block"],
                )
    return None


@moment("s6")
def evicted_tail_first(run: Run) -> Moment | None:
    places = authors(run)
    for step in run.steps:
        for event in step.of("evicted", why="taken"):
            author, index = places[event["hash"]]
            idle = [places[step.before.cached[block]] for block in step.before.idle]
            siblings = [place for name, place in idle if name == author]
            if len(siblings) > 1:
                return Moment(
                    step.number,
                    "Evicted, tail first",
                    f"A block is needed, and the free ones are all cached. {blocks(len(siblings))} of {label(author)} "
                    "are idle.",
                    "Which of them is given up first?",
                    ("The end of its text", "The beginning of its text"),
                    int(index == min(siblings)),
                    f"Block {event['block']}, place {index} in {label(author)}'s text: a text without its end can still "
                    "be found, one without its beginning cannot.",
                    event["block"],
                )
    return None


# ---- stage 7


@moment("s7")
def stored_to_the_host(run: Run) -> Moment | None:
    for step in run.steps:
        for event in step.of("stored"):
            return Moment(
                step.number,
                "Stored to the host",
                f"A block is needed. Block {event['from']} is idle, first in the queue, and is to be evicted.",
                "Is its text lost?",
                ("No", "Yes, as in stage 6"),
                int(event["hash"] not in step.after.host_cached.values()),
                f"It is copied to block {event['to']} of the host first. The host's pool is searched too when somebody "
                "begins with this text.",
                event["from"],
            )
    return None


@moment("s7")
def loaded_back(run: Run) -> Moment | None:
    for step in run.steps:
        loads = step.of("loaded")
        if loads:
            who = loads[0]["seq"]
            loads = step.of("loaded", seq=who)
            num_tokens, hits = len(step.before.sequences[who].tokens), step.of("hit", seq=who)
            found = step.of("admit", seq=who)[0]["num_computed_tokens"]
            return Moment(
                step.number,
                "Loaded back",
                f"{label(who)} was preempted, and there is room for it again. {blocks(len(loads))} of its text are on "
                "the host.",
                f"What does {label(who)} have to compute?",
                (f"All its {num_tokens} tokens again", f"The last {num_tokens - found}"),
                int(found > 0),
                f"{blocks(len(loads))} come back from the host and {blocks(len(hits))} are still on the device: {found} "
                "tokens need not be computed.",
                loads[0]["to"],
            )
    return None
