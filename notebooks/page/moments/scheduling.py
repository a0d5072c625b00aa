"""Stages 4 and 5: who runs, who gives way, who shares."""

from itertools import pairwise

from notebooks.page.moments.finding import Moment, blocks, moment, shortage
from notebooks.page.record import Event, Run, Step, label


def decodes(step: Step) -> list[str]:
    return [event["seq"] for event in step.of("chunk", why="decode")]


def before_it(step: Step, chunk: Event) -> str:
    """What a step computes before `chunk`: "A and B decode a token each, C computes 6, D computes 10"."""
    told = [f"{' and '.join(map(label, decodes(step)))} decode a token each"]
    for event in step.of("chunk", why="prefill"):
        if event is chunk:
            break
        told.append(f"{label(event['seq'])} computes {event['end'] - event['start']}")
    return ", ".join(told)


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
                    f"{who}'s prompt has {length} tokens. A step computes at most {budget}, and others come first: "
                    f"{' and '.join(map(label, decodes(step)))} are to get a token each.",
                    f"How much of {who}'s prompt comes along?",
                    (f"{size} tokens, what is left of the step", f"All {length}, or none"),
                    int(size == length),
                    f"A chunk in a decode step: {before_it(step, event)}, and {size} of the {budget} are left for "
                    f"{who}. Its other {length - size} come later: nobody stands still for a long prompt.",
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
                    f"There are {run.events[0]['max_num_seqs']} seats: no more run at a time. "
                    f"{label(earlier.of('end')[0]['seq'])} has ended, {len(others)} others are in the middle of their "
                    f"texts, and {who} waits.",
                    f"When does {who} begin?",
                    ("In the next step", "When the others have ended"),
                    int(event["step"] != earlier.number + 1),
                    f"The seat is refilled at once, beside the others. In stages 1 to 3 {who} would wait until the "
                    "whole batch has ended.",
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
                "Who gives its blocks up for it?",
                (f"{label(first)}, which came first", f"{label(last)}, which came last"),
                int(victim == last),
                f"{label(victim)} gives back {blocks(len(table))}, and waits as the first in the queue. Its {tokens} "
                f"computed tokens are lost: they will be computed again.{too_late(step)}",
                table[0],
            )
    return None


def too_late(step: Step) -> str:
    """Tell of somebody who ends in the same step, since the free blocks are there to be seen."""
    ended = [label(event["seq"]) for event in step.of("end")]
    return f" ({' and '.join(ended)} ended later in this step, and gave back as well.)" if ended else ""


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
                "one is not full, and each sample is to write a token of its own into it.",
                "How many copies of that block are made?",
                (f"{samples}, one for each sample", f"{samples - 1}, all but one"),
                int(len(copies) == samples - 1),
                f"Block {source} counts {samples} holders, then {samples - 1}, then 1: whoever is alone writes in "
                f"place. The {blocks(len(steady))} that are full keep a count of {samples}.",
                source,
            )
    return None
