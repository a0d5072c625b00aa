"""Stages 4 and 5: who runs, who gives way, who shares."""

from itertools import pairwise

from notebooks.page.moments.finding import Moment, blocks, moment
from notebooks.page.record import Run, Step, label


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
                    "A long prompt among decodes",
                    f"{who}'s prompt has {length} tokens. A step computes at most {budget}, and others are to decode "
                    "in it.",
                    f"How much of {who}'s prompt comes along?",
                    (f"{size} tokens, what is left of the step", f"All {length}, or none"),
                    int(size == length),
                    f"{' and '.join(map(label, decodes(step)))} decode a token each, a prompt that was begun before "
                    f"takes {budget - size - len(decodes(step))}, and {who} gets {size}. The other {length - size} "
                    "come in the next step: nobody stands still for a long prompt.",
                    step.after.sequences[event["seq"]].block_table[0],
                )
    return None


@moment("s4")
def seat_refilled(run: Run) -> Moment | None:
    seen: set[str] = set()  # a preempted sequence that comes back is another story
    for earlier, step in pairwise(run.steps):
        seen |= set(earlier.after.running)
        for event in step.of("admit"):
            who, others = label(event["seq"]), step.before.running
            if earlier.of("end") and earlier.of("held_up", seq=event["seq"]) and others and event["seq"] not in seen:
                return Moment(
                    step.number,
                    "A seat comes free",
                    f"{label(earlier.of('end')[0]['seq'])} has ended, {len(others)} others are in the middle of their "
                    f"texts, and {who} waits.",
                    f"When does {who} begin?",
                    ("In the next step", "When the others have ended"),
                    int(event["step"] != earlier.number + 1),
                    f"{who} is admitted at once, beside the others. In stages 1 to 3 it would wait for the whole "
                    "batch.",
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
                "No block is free",
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
                "Three samples, one last block",
                f"F's prompt is computed, and {samples} samples begin. They share its {blocks(len(shared))}; the last "
                "one is not full, and each sample writes a token into it.",
                "How many copies of that block are made?",
                (f"{samples}, one for each sample", f"{samples - 1}, all but one"),
                int(len(copies) == samples - 1),
                f"Block {source} counts {samples} holders, then {samples - 1}, then 1: whoever is alone writes in "
                f"place. The {blocks(len(steady))} that are full keep a count of {samples}.",
                source,
            )
    return None
