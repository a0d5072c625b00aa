"""Stages 1 to 3: pieces, blocks, promises."""

from itertools import pairwise

from nanovllm.trace import State
from notebooks.page.moments.finding import Moment, moment
from notebooks.page.record import Run, label
from notebooks.page.workload import BLOCK_SIZE


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
                "A piece is given back",
                f"{ended} ends in the next step. {sum(sizes)} slots will be free, and {label(first)} waits for "
                f"{needed}.",
                f"Is there room for {label(first)} then?",
                (f"Yes: {sum(sizes)} are enough", f"No, though {sum(sizes)} are free"),
                int(max(sizes) < needed),
                f"Free, but not in one piece: the pieces have {' and '.join(map(str, sizes))} slots, and stage 1 needs "
                f"{needed} side by side. (It also lets nobody in before the whole batch has ended: stage 4 cures "
                "that.)",
                step.of("released")[0]["start"] // BLOCK_SIZE,
            )
    return None


# ---- stages 2 and 3


@moment("s2")
def scattered_table(run: Run) -> Moment | None:
    for step in run.steps:
        for event in step.of("admit"):
            table = step.after.sequences[event["seq"]].block_table
            gaps = [b - a for a, b in pairwise(table)]
            if any(gap != 1 for gap in gaps):
                places = ", ".join(map(str, table))
                return Moment(
                    step.number,
                    "Blocks that lie apart",
                    f"A new batch begins. {label(event['seq'])} needs {len(table)} blocks, and the next free ones do "
                    "not lie side by side.",
                    "Can one sequence have them?",
                    ("Yes, any blocks do", "No, it would have to wait"),
                    int(event["seq"] not in step.after.running),
                    f"A table takes the place of a piece. This table says that the tokens are in blocks {places}: "
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
            held = {each for seq in step.before.sequences.values() for each in seq.block_table}
            if giver and giver != taker and {block - 1, block + 1} <= held:
                return Moment(
                    step.number,
                    "Which block comes next",
                    f"{label(giver)} gave its blocks back, and left holes between the others'. Now "
                    f"{label(taker)}'s last block is full.",
                    f"Which block does {label(taker)} take?",
                    (f"One that {label(giver)} gave back", "One that nobody has used"),
                    int(block not in given_back),
                    f"Block {block} was freed in the middle, and is taken again: a block that comes back is the next "
                    "to be taken. Any hole fits, since all blocks have one size.",
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
                    f"{promised} blocks are promised to the others, for their full lengths, though only "
                    f"{num_blocks - num_free} are held. {promised} + {event['needed']} is more than {num_blocks}.",
                )
    return None
