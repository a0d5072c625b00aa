"""The tables that READMEs take from results.json: one function for each, by name in BLOCKS."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stages.tools.prose.figures import WIDE, shown
from stages.tools.prose.markdown import Column, duration, mib, table_of, whole

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
    ranges = f"A range follows a number if the rounds differ by more than {WIDE:.0%}."
    return f'Measured on {results["machine"]}. {ranges} "The same" is a ratio whose range contains 1.\n'


def answers_of(stage: str) -> Callable[[Results], str]:
    """Return a block with the lesson's questions and their measured answers, folded."""

    def block(results: Results) -> str:
        text = fill_in((PREDICT / f"{stage}.md").read_text("utf-8"), results | results["predict"].get(stage, {}))
        entries = (section.split("\n", 1) for section in text.split("## ")[1:])
        folded = "<details><summary>{}</summary>\n\n{}\n\n</details>\n"
        return "".join(folded.format(question, " ".join(answer.split())) for question, answer in entries)

    return block


def fill_in(text: str, results: Results) -> str:
    """Return a text with the numbers that its places name.

    >>> fill_in("It takes {cost.16:.1f} times as long.", {"cost": {"16": 1.25}})
    'It takes 1.2 times as long.'
    """
    return PLACE.sub(lambda match: shown(results, match[1], match[2] or ""), text)


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


def scoreboard_block(
    results: Results, stages: Sequence[int] = range(1, 8), tables: Sequence[Sequence[str]] = NARROW
) -> str:
    """Show what each of `stages` gains and costs, in narrow tables."""
    prefixes = tuple(f"s{number}," for number in stages)
    rows = {name: row for name, row in results["scoreboard"].items() if name.startswith(prefixes)}
    parts = []
    for keys in tables:
        if shown := {name: row for name, row in rows.items() if row.keys() & {*keys}}:
            parts.append(table_of("stage", [column for column in SCORES if column.key in keys], shown))
    return "\n".join(parts)


def scoreboard_of(number: int) -> Callable[[Results], str]:
    """Return a block for a lesson: its stage next to the previous one.

    Stage 3 is about speed: it shows stage 1 too, and not the pool, which is held as in stage 2.
    """
    if number == 3:
        return lambda results: scoreboard_block(results, range(1, 4), NARROW[:1])
    return lambda results: scoreboard_block(results, range(number - 1, number + 1))


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
    """Compare several outputs of one prompt: as requests of their own, and as samples."""
    runs = results["predict"]["s5"]["runs"]
    names = {"requests": "s4, 8 requests", "samples": "s5, n = 8"}
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


WAITS = (
    Column("tokens computed", "tokens", whole),
    Column("TTFT, median", "median_seconds", "{:.2f} s".format),
    Column("TTFT, the last", "last_seconds", "{:.2f} s".format),
)


def prefix_cache_block(results: Results) -> str:
    """Show prefix_cache.py's figures: requests with a common prefix, with the cache off and on."""
    shared, rows = results["prefix_cache"]["shared"], {}
    for name, text in (("off", "without"), ("on", "with")):
        row = {key.replace(f"_{name}", ""): value for key, value in shared.items() if f"_{name}" in key}
        rows[f"31 requests, a common prefix of 512: {text}"] = row
    return table_of("the cache", WAITS, rows)


# ---- decode steps

STEPS = {  # the lesson's, by their cases, and by those of the kernel
    "1 x 128": ("storyteller_float32_1_128", "decode_1_128"),
    "32 x 128": ("storyteller_float32_32_128", "decode_32_128"),
    "16 x 4,000": ("storyteller_float32_16_4000", "decode_16_4000"),
    "1 x 4,000 and 15 x 128": ("storyteller_float32_16_4000_mixed", "mixed_4000"),
}
TIMES = (
    Column("s1", "s1_ms", "{:.1f} ms".format),
    Column("s2", "s2_ms", "{:.1f} ms".format),
    Column("s3", "s3_ms", "{:.1f} ms".format),
    Column("s3 against s2", "s3_over_s2", "{:.2f}".format, is_ratio=True),
    Column("kernel against s3", "ratio", "{:.2f}".format, is_ratio=True),
)


def decode_block(results: Results) -> str:
    """Show the decode steps of the lesson, and what the kernel of the branch gains in the same ones."""
    cases, kernel = results["decode"]["cases"], results["kernel"]["steps"]
    rows = {name: kernel.get(step, {}) | cases[case] for name, (case, step) in STEPS.items()}
    return table_of("batch x context", TIMES, rows)


# ---- drafts

TEXTS = {  # the lesson's
    "a story again, greedy": "again",
    "a new story, greedy": "greedy",
    "a new story, temperature 0.8": "sampled",
}
GUESSES = (
    Column("tokens a step", "tokens_a_step", "{:.2f}".format),
    Column("guesses", "drafted", whole),
    Column("right", "accepted", whole),
    Column("speed (1: without guesses)", "ratio", "{:.2f}".format, is_ratio=True),
)
COSTS = (
    Column("without guesses", "plain_ms", "{:.1f} ms".format),
    Column("with 4 guesses each", "guesses_ms", "{:.1f} ms".format),
    Column("cost of a step", "cost", "{:.2f}".format, is_ratio=True),
)


def drafts_block(results: Results) -> str:
    """Show what guesses gain in each text."""
    texts = results["drafts"]["texts"]
    return table_of("text", GUESSES, {name: texts[key] for name, key in TEXTS.items()})


def drafts_cost_block(results: Results) -> str:
    """Show what a step costs in which each sequence guesses, by model and batch."""
    batches = results["drafts"]["batches"]
    rows = {
        f"{model}, batch of {batch}": batches[model][batch]
        for model in ("storyteller", "135M")
        for batch in sorted(batches[model], key=int)
    }
    return table_of("model", COSTS, rows)


# ---- the kernel

IN_PLACE = {  # batch x context, or a chunk of a prompt
    "decode, 1 x 128": "decode_1_128",
    "decode, 1 x 1,000": "decode_1_1000",
    "decode, 8 x 1,000": "decode_8_1000",
    "decode, 16 x 1,000": "decode_16_1000",
    "decode, 32 x 128": "decode_32_128",
    "decode, 1 x 1,000 and 15 x 128": "mixed",
    "a chunk of 64 tokens that ends at 1,000": "chunk_64_1000",
    "a chunk of 512 tokens that ends at 4,000": "chunk_512_4000",
}
BACKENDS = (
    Column("tiles", "tiles_ms", "{:.1f} ms".format),
    Column("kernel", "kernel_ms", "{:.1f} ms".format),
    Column("speed, with tiles 1", "ratio", "{:.2f}".format, is_ratio=True),
)


def kernel_block(results: Results) -> str:
    """Show steps with tiles and with the kernel."""
    steps = results["kernel"]["steps"]
    return table_of("step", BACKENDS, {name: steps[key] for name, key in IN_PLACE.items()})


# ---- beams

OUTPUTS = {"4 requests": "requests", "4 samples": "samples", "4 beams": "beams", "1 beam, which is greedy": "alone"}
SEARCHES = (
    Column("steps", "steps", whole),
    Column("tokens computed", "tokens_computed", whole),
    Column("blocks", "blocks", whole),
    Column("blocks copied", "blocks_copied", whole),
    Column("a step", "step_ms", "{:.1f} ms".format),
)
LIKELIEST = {"1 beam, which is greedy": "alone", "the best of 4 samples": "samples", "the best of 4 beams": "beams"}
LIKELINESS = (
    Column("logprob", "logprob", "{:.1f}".format),
    Column("pairs of tokens that it repeats", "repeated", whole),
    Column("its last words", "end", str),
)


def beams_block(results: Results) -> str:
    """Show four outputs of a prompt as requests, as samples and as beams."""
    if "beams" not in results:
        return NOT_YET
    prompts = {"a few words": "story", "200 tokens": "long"}
    rows = {
        f"{text}: {way}": results["beams"][name][key] for text, name in prompts.items() for way, key in OUTPUTS.items()
    }
    return table_of("prompt: outputs", SEARCHES, rows)


def beams_texts_block(results: Results) -> str:
    """Show how likely an output is, and how often it repeats itself."""
    if "beams" not in results:
        return NOT_YET
    texts = results["beams"]["texts"]
    return table_of("output", LIKELINESS, {name: texts[key] for name, key in LIKELIEST.items()})


# ---- two engines

ENGINES = {  # the lesson's
    "one, 512 tokens in a step": "512",
    "one, 128": "128",
    "one, 64": "64",
    "one, 32": "32",
    "two": "two",
}
GAPS = (
    Column("ITL, median", "itl_ms", "{:.1f} ms".format),
    Column("ITL, p95", "itl_p95_ms", "{:.1f} ms".format),
    Column("TTFT", "ttft_ms", "{:,.0f} ms".format),
)


def two_engines_block(results: Results) -> str:
    """Show how long sequences that decode wait, and how long a prompt does, with one engine and with two."""
    engines = results["two_engines"]["engines"]
    return table_of("engines", GAPS, {name: engines[key] for name, key in ENGINES.items()})


# ---- two ranks

RANKS = (
    Column("one rank", "one_ms", "{:.1f} ms".format),
    Column("two ranks", "two_ms", "{:.1f} ms".format),
    Column("speed, one rank 1", "ratio", "{:.2f}".format, is_ratio=True),
)


def two_ranks_block(results: Results) -> str:
    """Show what a decode step takes on one rank and on two, which share a processor."""
    if "two_ranks" not in results:
        return NOT_YET
    steps = results["two_ranks"]["steps"]
    return table_of("storyteller", RANKS, {f"batch of {batch}": row for batch, row in steps.items()})


NUMBERS = range(1, 8)  # of the stages
BLOCKS: dict[str, Callable[[Results], str]] = {
    "run": run_block,
    "machine": machine_block,
    "scoreboard": scoreboard_block,
    "serving": serving_block,
    "samples_of_one_prompt": samples_of_one_prompt_block,
    "scarce_samples_s6": scarce_samples_of("s5", "s6"),
    "scarce_samples_s7": scarce_samples_of("s6", "s7"),
    "prefix_cache": prefix_cache_block,
    "offload": offload_block,
    "offload_talks": offload_talks_block,
    "decode": decode_block,
    "beams": beams_block,
    "beams_texts": beams_texts_block,
    "drafts": drafts_block,
    "drafts_cost": drafts_cost_block,
    "kernel": kernel_block,
    "two_engines": two_engines_block,
    "two_ranks": two_ranks_block,
    **{f"answers_{questions.stem}": answers_of(questions.stem) for questions in PREDICT.glob("more_*.md")},
    **{f"scoreboard_s{number}": scoreboard_of(number) for number in NUMBERS},
    **{f"run_s{number}": screen_of(f"s{number}") for number in NUMBERS},
    **{f"answers_s{number}": answers_of(f"s{number}") for number in NUMBERS},
}
