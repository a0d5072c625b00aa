"""The tables and other blocks that the READMEs take from results: one function for each, by name in BLOCKS."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.chaintools import added_lines, load

ROOT = Path(__file__).resolve().parent.parent
STORYTELLER = ROOT / "models" / "storyteller"
Results = dict[str, Any]  # what stages/results.json holds


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table.

    >>> print(table(["a", "b"], [["1", "2"]]), end="")
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    lines.insert(1, "|" + "---|" * len(header))
    return "\n".join(lines) + "\n"


def run_block(results: Results) -> str:
    """What `make run` prints, first story and last line."""
    return "```text\n" + results["run"]["screen"] + "\n```\n"


IDEAS = {  # the chain of stages: name, what it adds
    "1, contiguous cache": "one pool; each sequence reserves its slots in one piece",
    "2, block manager": "blocks, block tables, a free list",
    "3, paged attention": "attention reads blocks where they lie, all sequences at once",
    "4, continuous batching": "a scheduler: admission at every step, chunked prefill, preemption",
    "5, copy-on-write": "samples and beams that share blocks until they differ",
    "6, prefix caching": "blocks found again by the hash of what they hold",
    "7, CPU offload": "a second tier: swap blocks out and in",
}


def stages_block(results: Results) -> str:
    """The table of the chain: idea, lines in the diff, measured effect."""
    stages = load(ROOT).stages
    rows = []
    for number, (name, idea) in enumerate(IDEAS.items()):
        if number < len(stages):
            stage = stages[number]
            link = f"[{name}]({stage.folder.relative_to(ROOT)}/README.md)"
            rows.append([link, idea, f"{added_lines(stage):,}", EFFECTS[stage.key](results)])
        else:
            rows.append([name, idea, "to come", "to come"])
    return table(["stage", "idea", "lines added", "measured effect"], rows)


def effect_s1(results: Results) -> str:
    """What the cache buys, and what it leaves empty, as shares of what is reserved."""
    gain = results["predict"]["s1"]["cache_at_990"]
    runs = results["scoreboard"].values()
    empty = [run["wasted_bytes"] / run["held_bytes"] for run in runs]
    return f"token 990 comes {gain:.0f} times sooner; {min(empty):.0%} to {max(empty):.0%} of what is reserved is empty"


EFFECTS: dict[str, Callable[[Results], str]] = {"s1": effect_s1}


def scoreboard_block(results: Results) -> str:
    return table(SCORE_HEADER, [score_row(name, row) for name, row in results["scoreboard"].items()])


SCORE_HEADER = ["stage", "seats", "steps", "tokens computed", "tokens/s", "first token", "held", "used", "wasted"]


def score_row(name: str, row: dict[str, Any]) -> list[str]:
    """One run of the scoreboard's workload; the pool at the moment when most of it was used."""
    mib = {key: f"{row[key] / 2**20:.1f} MiB" for key in ("held_bytes", "used_bytes", "wasted_bytes")}
    return [
        name,
        str(row["seats"]),
        f"{row['steps']:,}",
        f"{row['tokens_computed']:,}",
        f"{row['tokens_per_second']:.0f}",
        f"{row['first_token_seconds'] * 1000:.0f} ms",
        *mib.values(),
    ]


def machine_block(results: Results) -> str:
    return f"Measured on {results['machine']}.\n"


def answers_block(stage: str) -> Callable[[Results], str]:
    """The lesson's questions with the measured answers, folded."""

    def block(results: Results) -> str:
        folded = "<details><summary>{question}</summary>\n\n{answer}\n\n</details>\n"
        return "".join(folded.format(**entry) for entry in results["predict"][stage]["answers"])

    return block


def training_block(results: Results) -> str:
    """The model card's table of a training run."""
    run = json.loads((STORYTELLER / "training.json").read_text("utf-8"))
    settings, last = run["settings"], run["curve"][-1]
    rows = [
        ["held-out loss", f"{last['held_out']:.2f} nats a token, on two books that were never trained on"],
        ["training loss", f"{last['train']:.2f} nats a token, over the last steps"],
        ["tokens", f"{last['tokens'] / 1e6:.0f} million, {last['tokens'] / run['epoch_tokens']:.1f} epochs"],
        ["rows", f"{settings['short_row']} tokens for the first {settings['short_share']:.0%}, then full ones"],
        ["batch", f"{settings['batch_tokens']:,} tokens"],
        ["peak learning rate", f"Muon {settings['matrix_learning_rate']}, AdamW {settings['learning_rate']}; cosine"],
        ["weight decay, dropout", f"{settings['weight_decay']} on the matrices, {settings['dropout']}"],
    ]
    return table(["", ""], rows)


def samples_block(results: Results) -> str:
    """The model card's samples: the beginning in bold, what the model wrote after it."""
    samples = json.loads((STORYTELLER / "samples.json").read_text("utf-8"))
    stories = (f"**{sample['prompt']}**{sample['text']}" for sample in samples)
    return "\n\n".join("> " + story.strip().replace("\n", "\n>\n> ") for story in stories) + "\n"


BLOCKS: dict[str, Callable[[Results], str]] = {
    "run": run_block,
    "stages": stages_block,
    "training": training_block,
    "samples": samples_block,
    "scoreboard": scoreboard_block,
    "machine": machine_block,
    "answers_s1": answers_block("s1"),
}
