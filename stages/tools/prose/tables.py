"""The tables that READMEs take from results.json: one function for each, by name in BLOCKS."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.tools.prose.markdown import Column, duration, look_up, mib, table, table_of, whole

Results = dict[str, Any]  # what stages/bench/results.json holds
NOT_YET = "Not measured yet.\n"
PREDICT = Path(__file__).resolve().parents[2] / "bench" / "predict"  # sN.md has the questions of stage N
PLACE = re.compile(r"{([\w.]+)(?::([^}]+))?}")


def run_block(results: Results) -> str:
    """Return two commands and their output: the same story in one piece and in blocks."""
    return f"```console\n{results['run']['screen']}\n```\n"


def screen_of(stage: str) -> Callable[[Results], str]:
    """Return a block with the last lines that a lesson's commands print, in which a stage shows its subject."""

    def block(results: Results) -> str:
        screens = results.get("run", {}).get("lessons", {})
        return f"```console\n{screens[stage]}\n```\n" if stage in screens else NOT_YET

    return block


def machine_block(results: Results) -> str:
    return f"Measured on {results['machine']}.\n"


def answers_of(stage: str) -> Callable[[Results], str]:
    """Return a block with the lesson's questions and their measured answers, folded."""

    def block(results: Results) -> str:
        text = fill_in((PREDICT / f"{stage}.md").read_text("utf-8"), results | results["predict"][stage])
        entries = (section.split("\n", 1) for section in text.split("## ")[1:])
        folded = "<details><summary>{}</summary>\n\n{}\n\n</details>\n"
        return "".join(folded.format(question, " ".join(answer.split())) for question, answer in entries)

    return block


def fill_in(text: str, results: Results) -> str:
    """Return a text with the numbers that its places name.

    >>> fill_in("It takes {cost.16:.1f} times as long.", {"cost": {"16": 1.25}})
    'It takes 1.2 times as long.'
    """
    return PLACE.sub(lambda match: format(look_up(results, match[1]), match[2] or ""), text)


# ---- the scoreboard, and other tables with its columns

SCORES = (  # the pool's bytes are those of the moment when most of it was used
    Column("seats", "seats", whole),
    Column("steps", "steps", whole),
    Column("tokens computed", "tokens_computed", whole),
    Column("computed twice", "computed_twice", whole),
    Column("preemptions", "preemptions", whole),
    Column("tokens/s", "tokens_per_second", whole),
    Column("TTFT", "first_token_seconds", duration),
    Column("promised", "promised_bytes", mib),
    Column("held", "held_bytes", mib),
    Column("used", "used_bytes", mib),
    Column("wasted", "wasted_bytes", mib),
    Column("blocks", "blocks", whole),
    Column("blocks copied", "blocks_copied", whole),
    Column("stored", "blocks_stored", whole),
    Column("loaded", "blocks_loaded", whole),
)


NARROW = (  # SCORES in tables that fit on a screen
    ("seats", "steps", "tokens_computed", "tokens_per_second", "first_token_seconds"),
    ("promised_bytes", "held_bytes", "used_bytes", "wasted_bytes"),
    ("blocks_copied", "blocks_stored", "blocks_loaded"),
)


def scoreboard_block(results: Results, stages: Sequence[int] = range(1, 8)) -> str:
    """Show what each of `stages` gains and costs, in narrow tables."""
    prefixes = tuple(f"s{number}," for number in stages)
    rows = {name: row for name, row in results["scoreboard"].items() if name.startswith(prefixes)}
    parts = []
    for keys in NARROW:
        if shown := {name: row for name, row in rows.items() if row.keys() & {*keys}}:
            parts.append(table_of("stage", [column for column in SCORES if column.key in keys], shown))
    return "\n".join(parts)


def scoreboard_of(number: int) -> Callable[[Results], str]:
    """Return a block for a lesson: its stage next to the previous one. Stage 3 is about speed: it shows stage 1 too."""
    return lambda results: scoreboard_block(results, range(1 if number == 3 else number - 1, number + 1))


def serving_block(results: Results) -> str:
    """Show serving.py's figures: stages 3 and 4 from a small pool; transformers, and stage 4 with room for all."""
    serving = results["serving"]
    small = {"s3": "s3, a pool of 2,048", "s4": "s4, a pool of 2,048"}
    roomy = {
        "s4": "s4, room for all",
        "generate": "transformers `generate`, one static batch",
        "generate_batch": "transformers `generate_batch`, continuous",
    }
    rows = {text: serving[name] for name, text in small.items()}
    rows |= {text: serving["peers"][name] for name, text in roomy.items() if name in serving.get("peers", {})}
    failed = "".join(f"\n{name} failed: {row['error']}.\n" for name, row in rows.items() if "error" in row)
    return table_of("stage", SCORES, {name: row for name, row in rows.items() if "error" not in row}) + failed


def samples_of_one_prompt_block(results: Results) -> str:
    """Compare several outputs of one prompt: as requests of their own, as samples, as beams."""
    runs = results["predict"]["s5"]["runs"]
    names = {"requests": "s4, 8 requests", "samples": "s5, n = 8", "beams": "s5, a beam of 4"}
    return table_of("stage", SCORES, {text: runs[name] for name, text in names.items()})


def scarce_samples_of(*stages: str) -> Callable[[Results], str]:
    """Return a block with samples.py's counts in these stages: samples from pools too small for all of them."""

    def block(results: Results) -> str:
        if "samples" not in results:
            return NOT_YET
        scarce = results["samples"]["scarce"]
        parts = {"3": "a third", "6": "a sixth"}
        rows = {f"{text}: {name}": scarce[name][part] for part, text in parts.items() for name in stages}
        return table_of("pool: stage", SCORES, rows)

    return block


def overhead_block(results: Results) -> str:
    """Show the cost of a stage where its feature is not used: each stage over the previous one, in the same rounds."""
    overhead = results.get("overhead", {})
    pairs = [("s4", "s5"), ("s5", "s6"), ("s6", "s7")]
    if not {f"{after}_over_{before}" for before, after in pairs} <= overhead.keys():
        return NOT_YET
    rows = []
    for before, after in pairs:
        ratios = overhead[f"{after}_over_{before}"]
        rows.append([f"{after} over {before}", *(f"{ratios[key]:.2f}" for key in ("ratio", "least", "largest"))])
    return table(["tokens/s", "median of the rounds", "the least", "the largest"], rows)


MOVED = (  # what a lesson shows of SCORES about a second tier
    ("steps", "tokens_computed", "computed_twice", "preemptions", "tokens_per_second"),
    ("first_token_seconds", "blocks_stored", "blocks_loaded"),
)


def offload_block(results: Results) -> str:
    """Show offload.py's figures: stage 6, and stage 7 with each policy, from a third of the memory."""
    if "offload" not in results:
        return NOT_YET
    names = {"s6": "s6", "recompute": "s7, recompute", "load": "s7, load", "auto": "s7, auto"}
    rows = {text: results["offload"]["pools"][name] for name, text in names.items()}
    parts = ([column for column in SCORES if column.key in keys] for keys in MOVED)
    return "\n".join(table_of("stage, policy", part, rows) for part in parts)


def offload_talks_block(results: Results) -> str:
    """Show conversations that pause while others talk: the tokens that stages 6 and 7 compute, and their hits."""
    talks = results.get("offload", {}).get("talks", {})
    names = {"s6": "s6", "load": "s7, load"}
    return table_of("stage", TALKS, {text: talks[name] for name, text in names.items()}) if talks else NOT_YET


TALKS = (
    Column("steps", "steps", whole),
    Column("tokens computed", "tokens_computed", whole),
    Column("tokens found", "tokens_hit", whole),
)


# ---- the prefix cache


def prefix_cache_block(results: Results) -> str:
    """Show prefix_cache.py's figures: requests with a common prefix, with the cache off and on."""
    shared = results["prefix_cache"]["shared"]
    rows = []
    for name, text in (("off", "without"), ("on", "with")):
        waits = [f"{shared[f'{which}_{name}_seconds']:.2f} s" for which in ("median", "last")]
        rows.append([f"31 requests, a common prefix of 512: {text}", whole(shared[f"tokens_{name}"]), *waits])
    return table(["the cache", "tokens computed", "TTFT, median", "TTFT, the last"], rows)


# ---- decode steps

TIMES = (
    Column("s1", "s1_ms", "{:.1f} ms".format),
    Column("s2", "s2_ms", "{:.1f} ms".format),
    Column("s3", "s3_ms", "{:.1f} ms".format),
    Column("s3 against s2", "s3_over_s2", "{:.2f}".format),
    Column("s3 against s1", "s3_over_s1", "{:.2f}".format),
)
SHORT, MANY = 128, 16  # tokens of a short context, and sequences of a large batch
TOLERANCE = 0.05  # a ratio that is nearer to 1 is neither a gain nor a loss
TRAFFIC = (
    Column("padding", "padding", "{:.0%}".format),
    Column("must read", "bytes", lambda size: f"{size / 1e6:.0f} MB"),
    Column("s3, of the bandwidth", "s3_of_bandwidth", "{:.0%}".format),
)


def decode_table(cases: list[dict[str, Any]], columns: Sequence[Column]) -> str:
    """Return a table with a line per case of a decode step: batch and context, then the time of a step."""
    rows = {
        f"{case['batch']} x {case['context']:,}" + (", the others 128" if case["is_mixed"] else ""): case
        for case in cases
    }
    return table_of("batch x context", columns, rows)


def in_order(case: dict[str, Any]) -> tuple[bool, int, int]:
    """Return a sort key that puts mixed batches last."""
    return case["is_mixed"], case["context"], case["batch"]


def decode_block(results: Results) -> str:
    """Show every decode step: times of the storyteller in float32; the bytes of a step and the rest, folded."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for case in sorted(results["decode"]["cases"].values(), key=in_order):
        groups.setdefault((case["model"], case["dtype"]), []).append(case)
    first = groups.pop(("storyteller", "float32"))
    shown = decode_table(first, TIMES)
    rest = {"What a step reads": decode_table(first, TRAFFIC)}
    rest |= {", ".join(name): decode_table(cases, TIMES) for name, cases in sorted(groups.items())}
    folded = "\n<details><summary>{}</summary>\n\n{}\n</details>\n"
    note = "\nThe last two columns are medians over pairs of steps, not quotients of the times beside them.\n"
    return shown + note + "".join(folded.format(*each) for each in rest.items())


def decode_gain_block(results: Results) -> str:
    """Say where stage 3's gain over stage 2 begins and ends, by dtype: for short contexts, and in a large batch."""
    cases = [case for case in results["decode"]["cases"].values() if not case["is_mixed"]]
    lines = ""
    for dtype in ("float32", "bfloat16"):
        own = [case for case in cases if (case["model"], case["dtype"]) == ("storyteller", dtype)]
        by_batch = {case["batch"]: case["s3_over_s2"] for case in own if case["context"] == SHORT}
        by_context = {case["context"]: case["s3_over_s2"] for case in own if case["batch"] == MANY}
        gain = f"at {SHORT} tokens each it is {where_it_begins(by_batch)}"
        lines += f"- {dtype}: {gain}; in a batch of {MANY} {where_it_ends(by_context)}.\n"
    return lines


def where_it_begins(gains: Mapping[int, float]) -> str:
    """Say from which batch on there is a gain.

    >>> where_it_begins({1: 0.9, 8: 1.04, 16: 1.3, 32: 1.6})
    'faster in batches of 16 and more, 1.60 times as fast in one of 32'
    >>> where_it_begins({1: 0.9, 8: 1.3, 16: 1.0})
    'not faster in a batch of 16 (1.00 times)'
    """
    behind = [batch for batch, each in gains.items() if each < 1 + TOLERANCE]
    largest = max(gains)
    if largest in behind:
        return f"not faster in a batch of {largest} ({gains[largest]:.2f} times)"
    first = min(batch for batch in gains if batch > max(behind, default=0))
    return f"faster in batches of {first} and more, {gains[largest]:.2f} times as fast in one of {largest}"


def where_it_ends(gains: Mapping[int, float]) -> str:
    """Say up to which context there is a gain. A context that measures unlike all its neighbors is named apart.

    >>> where_it_ends({128: 1.6, 512: 1.2, 1000: 1.01, 2000: 0.9})
    'the gain ends between 512 and 1,000 tokens (0.90 times as fast at 2,000)'
    >>> where_it_ends({128: 1.7, 512: 0.99, 1000: 0.9, 2000: 1.65, 4000: 0.8})
    'the gain ends between 128 and 512 tokens (0.80 times as fast at 4,000, but 1.65 times at 2,000)'
    >>> where_it_ends({128: 1.6, 512: 1.2})
    'the gain lasts to 512 tokens and beyond (1.20 times as fast at 512)'
    """
    contexts = sorted(gains)
    longest = contexts[-1]

    def odd_ones(end: int) -> list[int]:
        return [c for i, c in enumerate(contexts) if (gains[c] >= 1 + TOLERANCE) != (i < end)]

    end = min(range(len(contexts) + 1), key=lambda end: len(odd_ones(end)))  # the number of contexts with a gain
    if end == 0:
        where = "there is no gain"
    elif end == len(contexts):
        where = f"the gain lasts to {longest:,} tokens and beyond"
    else:
        where = f"the gain ends between {contexts[end - 1]:,} and {contexts[end]:,} tokens"
    odd = "".join(f", but {gains[c]:.2f} times at {c:,}" for c in odd_ones(end) if c != longest)
    return f"{where} ({gains[longest]:.2f} times as fast at {longest:,}{odd})"


NUMBERS = range(1, 8)  # of the stages
BLOCKS: dict[str, Callable[[Results], str]] = {
    "run": run_block,
    "machine": machine_block,
    "scoreboard": scoreboard_block,
    "serving": serving_block,
    "overhead": overhead_block,
    "samples_of_one_prompt": samples_of_one_prompt_block,
    "scarce_samples_s6": scarce_samples_of("s5", "s6"),
    "scarce_samples_s7": scarce_samples_of("s6", "s7"),
    "prefix_cache": prefix_cache_block,
    "offload": offload_block,
    "offload_talks": offload_talks_block,
    "decode": decode_block,
    "decode_gain": decode_gain_block,
    **{f"scoreboard_s{number}": scoreboard_of(number) for number in NUMBERS},
    **{f"run_s{number}": screen_of(f"s{number}") for number in NUMBERS},
    **{f"answers_s{number}": answers_of(f"s{number}") for number in NUMBERS},
}
