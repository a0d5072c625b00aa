"""Stages 6 and 7: texts that stay, are found, are evicted, and come back."""

from notebooks.page.moments.finding import Moment, blocks, moment, shortage
from notebooks.page.record import Event, Run, Step, label
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
                f"{who} gets its last token in the next step, and gives {blocks(len(step.of('given_back')))} back. "
                f"{len(kept)} of them are full, and keep their text.",
                f"When are these {len(kept)} taken for another text?",
                ("First: they are free again", "Last, after the empty ones"),
                int(set(step.after.free[-len(kept) :]) == set(kept)),
                "They are idle: nobody holds them, but each can be found by the hash of its text. They stand at the "
                "end of the queue of free blocks.",
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
                    f"{label(who)} is next. Its {num_tokens} tokens begin with the same text as {label(author)}'s, and "
                    f"{label(author)} has ended.",
                    f"How many of them does {label(who)} compute?",
                    (f"All {num_tokens}", f"The last {num_tokens - found}"),
                    int(step.of("admit", seq=who)[0]["num_computed_tokens"] == found),
                    f"Found by a stranger: {blocks(len(hits))} of {label(author)} are found by their hashes and held "
                    f"again. Their {found} tokens need not be computed.",
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
                    f"{shortage(step, event, taker(step, event), 'empty block')} {blocks(len(siblings))} with text of "
                    f"{label(author)} are idle.",
                    "Which of them is given up first?",
                    ("The end of its text", "The beginning of its text"),
                    int(index == min(siblings)),
                    f"Evicted, tail first: block {event['block']} is the last of {label(author)}'s. A text without its "
                    "end can still be found, one without its beginning cannot.",
                    event["block"],
                )
    return None


def taker(step: Step, event: Event) -> str:
    """Who takes the block that `event` makes room in."""
    block = event["from"] if event["kind"] == "stored" else event["block"]
    return label(step.of("taken", block=block)[0]["seq"])


# ---- stage 7


@moment("s7")
def stored_to_the_host(run: Run) -> Moment | None:
    for step in run.steps:
        for event in step.of("stored"):
            return Moment(
                step.number,
                "A text leaves the device",
                f"{shortage(step, event, taker(step, event), 'empty block')} Block {event['from']} is idle, and is the "
                "next to be evicted.",
                "Is its text lost?",
                ("No", "Yes, as in stage 6"),
                int(event["hash"] not in step.after.host_cached.values()),
                f"It is stored to the host first, in block {event['to']} there. Whoever begins with this text finds it "
                "there too.",
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
                f"{blocks(len(loads))} {'is' if len(loads) == 1 else 'are'} loaded back from the host, and {len(hits)} "
                f"more found on the device: {found} tokens need not be computed.",
                loads[0]["to"],
            )
    return None
