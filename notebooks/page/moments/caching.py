"""Stages 6 and 7: texts that stay, are found, are evicted, and come back."""

from notebooks.page.moments.finding import Moment, blocks, moment
from notebooks.page.record import Run, label
from notebooks.page.workload import BLOCK_SIZE


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
                "After the last token",
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
                    "A prompt that begins alike",
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
                    "Which text goes first",
                    f"A block is needed, and the free ones are all cached. {blocks(len(siblings))} of {label(author)} "
                    "are idle.",
                    "Which of them is given up first?",
                    ("The end of its text", "The beginning of its text"),
                    int(index == min(siblings)),
                    f"Block {event['block']}, the last of {label(author)}'s: a text without its end can still be "
                    "found, one without its beginning cannot.",
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
                "A text leaves the device",
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
                "A text is wanted again",
                f"{label(who)} was preempted, and there is room for it again. {blocks(len(loads))} of its text "
                f"{'is' if len(loads) == 1 else 'are'} on the host.",
                f"What does {label(who)} have to compute?",
                (f"All its {num_tokens} tokens again", f"The last {num_tokens - found}"),
                int(found > 0),
                f"From the host it gets {blocks(len(loads))}, and {blocks(len(hits))} more from the device: {found} "
                "tokens need not be computed.",
                loads[0]["to"],
            )
    return None
