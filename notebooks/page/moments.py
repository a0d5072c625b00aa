"""The moments that a reader should not miss, found in the recorded runs rather than placed by hand.

A moment is a question before a step, and an explanation after it. The right answer comes from the events.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from nanovllm.trace import State
from nanovllm.trace.events import Event
from notebooks.page.record import BLOCK_SIZE, TILE_SIZE, Run, Step, label


@dataclass(frozen=True)
class Moment:
    """A question before a step, and what the step shows."""

    step: int
    title: str
    sentence: str  # what the reader must know to answer
    question: str
    answers: tuple[str, str]
    right: int
    reveal: str
    block: int | None = None  # selected with the answer
    blocks: tuple[int, ...] = ()  # marked with the answer
    code: str | None = None  # the function shown with the answer, if it is not the one that last moved the block


Finder = Callable[[Run], Moment | None]
FINDERS: defaultdict[str, list[Finder]] = defaultdict(list)  # by stage


def moment(stage: str) -> Callable[[Finder], Finder]:
    """Register a function that finds a moment of this stage, or returns None if the run has none."""

    def register(find: Finder) -> Finder:
        FINDERS[stage].append(find)
        return find

    return register


def moments(stage: str, run: Run) -> list[dict[str, Any]]:
    """Return all moments of a stage, ordered by step. Raise ValueError if the run lacks one."""
    results = {find.__name__: find(run) for find in FINDERS[stage]}
    if missing := [name for name, result in results.items() if result is None]:
        raise ValueError(f"{stage}: no step has the moment {', '.join(missing)}")
    return sorted((asdict(result) for result in results.values() if result), key=lambda result: result["step"])


def shortage(step: Step, event: Event, who: str, free: str) -> str:
    """Say why `event` had to make room: `who` needs a block, and others took the last free ones in this step."""
    before = step.events[: step.events.index(event)]
    takers = list(dict.fromkeys(label(each["seq"]) for each in before if each["kind"] == "taken"))
    if not takers:
        return f"{who} needs a block, and there is no {free}."
    verb, last = ("takes", free) if len(takers) == 1 else ("take", f"{free}s")
    return f"{' and '.join(takers)} {verb} the last {last}, and {who} needs one too."


def listed(sequences: list[str]) -> str:
    """Return the names of sequences.

    >>> listed(["A", "F.0", "F.1"])
    'A, F1 and F2'
    """
    *first, last = map(label, sequences)
    return f"{', '.join(first)} and {last}" if first else last


def blocks(count: int) -> str:
    """Return a count of blocks.

    >>> blocks(1), blocks(2)
    ('1 block', '2 blocks')
    """
    return f"{count} block{'s' * (count != 1)}"


# ---- stage 1


def free_pieces(state: State) -> list[tuple[int, int]]:
    """Return (start, end) of each free piece of stage 1's pool."""
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
                "A piece is given back",
                f"{ended} finishes in the next step. {sum(sizes)} slots will be free, and {label(first)} waits for "
                f"{needed}.",
                f"Will {label(first)} fit then?",
                (f"Yes: {sum(sizes)} are enough", f"No, though {sum(sizes)} are free"),
                int(max(sizes) < needed),
                f"Free, but not in one piece: the pieces have {' and '.join(map(str, sizes))} slots, and stage 1 needs "
                f"{needed} in a row. (It also admits no request before the whole batch has finished, which stage 4 "
                "fixes.)",
                step.of("released")[0]["start"] // BLOCK_SIZE,
            )
    return None


# ---- stages 2 and 3


@moment("s2")
def scattered_table(run: Run) -> Moment | None:
    for step in run.steps:
        for event in step.of("admit"):
            table = [block for block in step.after.sequences[event["seq"]].block_table if block is not None]
            gaps = [b - a for a, b in pairwise(table)]
            if any(gap != 1 for gap in gaps):
                places = ", ".join(map(str, table))
                return Moment(
                    step.number,
                    "Blocks that lie apart",
                    f"A new batch begins. {label(event['seq'])} needs {len(table)} blocks, and the next free ones "
                    "are not adjacent.",
                    "Can one sequence use them?",
                    ("Yes, any blocks will do", "No, it has to wait"),
                    int(event["seq"] not in step.after.running),
                    f"A block table replaces the single piece. This one says that the tokens are in blocks {places}: "
                    "follow the arrows.",
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
                f"{who} has 16 tokens in the pool: two blocks of {BLOCK_SIZE} are full to the last slot.",
                "What does its next token take?",
                ("One slot", f"A block of {BLOCK_SIZE} slots"),
                int(num_taken == 1),
                f"{who} takes block {block}: one slot is used, {BLOCK_SIZE - 1} are held and empty. "
                "That is the most it can waste, however long it gets.",
                block,
            )
    return None


@moment("s2")
def taken_again(run: Run) -> Moment | None:
    given_back: dict[int, str] = {}
    for step in run.steps:
        for event in step.of("taken", why="grow"):
            giver, taker, block = given_back.get(event["block"]), event["seq"], event["block"]
            held = {each for seq in step.before.sequences.values() for each in seq.block_table}
            if giver and giver != taker and {block - 1, block + 1} <= held:
                return Moment(
                    step.number,
                    "Which block comes next",
                    f"{label(giver)} gave its blocks back, and left holes between the others'. Now "
                    f"{label(taker)}'s last block is full.",
                    f"Which block does {label(taker)} take?",
                    (f"One that {label(giver)} gave back", "One that was never used"),
                    int(block not in given_back),
                    f"Block {block} was freed in the middle and is taken again: the last block to be freed is the "
                    "next to be taken. Any hole fits, because all blocks have the same size.",
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
                    f"A new batch begins, which leaves {num_free} of {num_blocks} blocks free. {who} may need up to "
                    f"{event['needed']}.",
                    f"Is {who} in the batch?",
                    ("No", f"Yes, {num_free} blocks are free"),
                    int(event["seq"] in step.after.running),
                    f"{promised} blocks are promised to the others for their full lengths, though they hold only "
                    f"{num_blocks - num_free}. {promised} + {event['needed']} is more than {num_blocks}.",
                )
    return None


@moment("s3")
def tile_by_tile(run: Run) -> Moment | None:
    """Find the step with the most blocks in which every sequence generates a token, and none ends."""
    best: tuple[Step, list[list[int | None]]] | None = None
    for step in run.steps:
        if len(decodes(step)) > 2 and {*decodes(step)} == {*step.after.running} == {*step.before.running}:
            tables = [step.after.sequences[seq].block_table for seq in decodes(step)]
            if best is None or sum(map(len, tables)) > sum(map(len, best[1])):
                best = step, tables
    if best is None:
        return None
    step, tables = best
    num_held, num_each = sum(map(len, tables)), max(1, TILE_SIZE // (len(tables) * BLOCK_SIZE))
    first = [block for table in tables for block in table[:num_each] if block is not None]
    return Moment(
        step.number,
        "What attention copies",
        f"{listed(decodes(step))} generate a token each, and attention reads the {num_held} blocks in their tables. "
        f"Stage 2 copies all of them out of the pool first. In stage 3, a tile has {TILE_SIZE} slots.",
        "How many blocks does stage 3 copy at once?",
        (f"All {num_held}, as in stage 2", f"At most {TILE_SIZE // BLOCK_SIZE}, one tile"),
        int(len(first) <= TILE_SIZE // BLOCK_SIZE),
        f"The first tile is marked: {blocks(num_each)} of each sequence. Attention to these blocks is merged with "
        "attention to the next tile, and so on. The copy stays this small however long the texts get.",
        first[0],
        tuple(first),
        "PagedAttention._attend",
    )


# ---- stage 4


def decodes(step: Step) -> list[str]:
    return [event["seq"] for event in step.of("chunk", why="decode")]


def earlier_work(step: Step, chunk: Event) -> str:
    """Describe a step's work before `chunk`: "A and B decode a token each, C computes 6 and D 10"."""
    before = step.of("chunk", why="prefill")
    sizes = [(label(event["seq"]), event["end"] - event["start"]) for event in before[: before.index(chunk)]]
    prefills = " and ".join(f"{who} {'computes ' * (n == 0)}{size}" for n, (who, size) in enumerate(sizes))
    decoding = f"{listed(decodes(step))} decode a token each"
    return f"{decoding}, {prefills}" if prefills else decoding


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
                    "A long prompt among decodes",
                    f"{who}'s prompt has {length} tokens. A step computes at most {budget} in all, and others come "
                    f"first: {earlier_work(step, event)}.",
                    f"How many tokens of {who}'s prompt does the step compute?",
                    ("None, until the whole prompt fits", f"{size}, all that is left"),
                    int(0 < size < length),
                    f"The others take {budget - size} of the {budget} tokens, and {who} computes a chunk of the "
                    f"remaining {size}. Its other {length - size} follow in later steps, and no request waits for "
                    "a long prompt.",
                    step.after.sequences[event["seq"]].block_table[0],
                )
    return None


@moment("s4")
def seat_refilled(run: Run) -> Moment | None:
    seen: set[str] = set()  # a preempted sequence that comes back does not count
    for earlier, step in pairwise(run.steps):
        seen |= set(earlier.after.running)
        for event in step.of("admit"):
            who, others = label(event["seq"]), step.before.running
            if earlier.of("end") and earlier.of("held_up", seq=event["seq"]) and others and event["seq"] not in seen:
                return Moment(
                    step.number,
                    "A seat becomes free",
                    f"At most {run.events[0]['max_num_seqs']} sequences run at a time. "
                    f"{label(earlier.of('end')[0]['seq'])} has finished, {len(others)} others are in the middle of "
                    f"their texts, and {who} waits.",
                    f"When does {who} begin?",
                    ("In the next step", "When the others have finished"),
                    int(event["step"] != earlier.number + 1),
                    f"The seat is refilled at once. In stages 1 to 3, {who} would wait until the whole batch has "
                    "finished.",
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
                "Blocks run out",
                shortage(step, event, label(event["for"]), "free block"),
                "Which sequence gives up its blocks?",
                (f"{label(first)}, which came first", f"{label(last)}, which came last"),
                int(victim == last),
                f"{label(victim)} gives back {blocks(len(table))} and goes to the front of the queue. Its {tokens} "
                f"computed tokens are lost and will be recomputed.{too_late(step)}",
                table[0],
                code=event["by"],
            )
    return None


def too_late(step: Step) -> str:
    """Mention sequences that end later in the same step, because the reader sees their blocks free."""
    ended = [label(event["seq"]) for event in step.of("end")]
    return f" ({' and '.join(ended)} finished later in this step and freed blocks too.)" if ended else ""


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
                "Three samples, one last block",
                f"F's prompt is computed, and {samples} samples begin. They share its {blocks(len(shared))}. The last "
                "one is not full, and each sample will write its own token into it.",
                "How many copies of that block are made?",
                (f"{samples}, one for each sample", f"{samples - 1}, all but one"),
                int(len(copies) == samples - 1),
                f"Block {source} counts {samples} holders, then {samples - 1}, then 1: the last holder writes in "
                f"place. The other {blocks(len(steady))} are full and keep a count of {samples}.",
                source,
            )
    return None


# ---- stage 6


def authors(run: Run) -> dict[str, tuple[str, int]]:
    """Return the sequence that first computed each cached block, and its place in that sequence's table."""
    origins: dict[str, tuple[str, int]] = {}
    places: dict[int, tuple[str, int]] = {}  # the latest holder of each block
    for event in run.events:
        if event["kind"] in ("taken", "hit", "shared"):
            places[event["block"]] = event["seq"], event["index"]
        elif event["kind"] == "cached":
            origins.setdefault(event["hash"], places[event["block"]])
    return origins


@moment("s6")
def held_then_idle(run: Run) -> Moment | None:
    for step in run.steps:
        idle = step.of("idle")
        if idle and step.of("end"):
            who = label(step.of("end")[0]["seq"])
            kept = [event["block"] for event in idle]
            return Moment(
                step.number,
                "After the last token",
                f"{who} gets its last token in the next step and gives {blocks(len(step.of('given_back')))} back. "
                f"{len(kept)} of them are full, and keep their contents.",
                f"When will these {len(kept)} be taken for other tokens?",
                ("First: they are free again", "Last, after the empty ones"),
                int(set(step.after.free[-len(kept) :]) == set(kept)),
                "They are idle: no sequence holds them, but each can still be found by its hash. They are at the end "
                "of the free queue.",
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
                num_tokens, num_cached = len(step.before.sequences[who].tokens), BLOCK_SIZE * len(hits)
                return Moment(
                    step.number,
                    "A prompt with the same beginning",
                    f"{label(who)} is next. Its prompt has {num_tokens} tokens and begins like {label(author)}'s. "
                    f"{label(author)} has finished.",
                    f"How many of them does {label(who)} compute?",
                    (f"All {num_tokens}", f"The last {num_tokens - num_cached}"),
                    int(step.of("admit", seq=who)[0]["num_computed_tokens"] == num_cached),
                    f"{blocks(len(hits))} of {label(author)} {'is' if len(hits) == 1 else 'are'} found by hash and "
                    f"held again, so {num_cached} tokens need not be computed.",
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
                    "Which block goes first",
                    f"{shortage(step, event, taker(step, event), 'empty block')} {blocks(len(siblings))} of "
                    f"{label(author)} are idle.",
                    "Which of them is evicted first?",
                    (f"The one with the end of {label(author)}'s tokens", "The one with their beginning"),
                    int(index == min(siblings)),
                    f"The tail is evicted first: block {event['block']} is the last of {label(author)}'s. A prefix can "
                    "be found without its tail, but the tail cannot be found without its prefix.",
                    event["block"],
                )
    return None


def taker(step: Step, event: Event) -> str:
    """Return the sequence that takes the block in which `event` makes room."""
    block = event["from"] if event["kind"] == "stored" else event["block"]
    return label(step.of("taken", block=block)[0]["seq"])


# ---- stage 7


@moment("s7")
def stored_to_the_host(run: Run) -> Moment | None:
    for step in run.steps:
        for event in step.of("stored"):
            return Moment(
                step.number,
                "A block leaves the device",
                f"{shortage(step, event, taker(step, event), 'empty block')} Block {event['from']} is idle, and is the "
                "next to be evicted.",
                "Are its contents lost?",
                ("No", "Yes, as in stage 6"),
                int(event["hash"] not in step.after.host_cached.values()),
                f"They are first stored in block {event['to']} of the host, where a request with the same prefix can "
                "find them.",
                event["from"],
            )
    return None


@moment("s7")
def loaded_back(run: Run) -> Moment | None:
    for earlier, step in pairwise(run.steps):
        loads, ended = step.of("loaded"), earlier.of("end")
        if loads and ended:
            who = loads[0]["seq"]
            loads = step.of("loaded", seq=who)
            num_tokens, hits = len(step.before.sequences[who].tokens), step.of("hit", seq=who)
            num_cached = step.of("admit", seq=who)[0]["num_computed_tokens"]
            return Moment(
                step.number,
                "A prefix is needed again",
                f"{label(who)} was preempted and waits for room. {label(ended[0]['seq'])} has just finished, so "
                f"{len(step.before.free)} blocks are free now, and {label(who)} is next. {len(loads)} of the blocks "
                f"that it gave up {'is' if len(loads) == 1 else 'are'} on the host.",
                f"What does {label(who)} have to compute?",
                (f"All its {num_tokens} tokens again", f"The last {num_tokens - num_cached}"),
                int(num_cached > 0),
                f"{blocks(len(loads))} {'is' if len(loads) == 1 else 'are'} loaded back from the host, and {len(hits)} "
                f"more are found on the device: {num_cached} tokens need not be computed.",
                loads[0]["to"],
            )
    return None
