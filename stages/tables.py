"""The tables and other blocks that the READMEs take from results: one function for each, by name in BLOCKS."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def scoreboard_block(results: Results) -> str:
    return table(SCORE_HEADER, [score_row(name, row) for name, row in results["scoreboard"].items()])


def scoreboard_s1_block(results: Results) -> str:
    """Only stage 1's rows, for its lesson."""
    rows = [score_row(name, row) for name, row in results["scoreboard"].items() if name.startswith("s1")]
    return table(SCORE_HEADER, rows)


SCORE_HEADER = ["stage", "seats", "steps", "tokens computed", "tokens/s", "TTFT", "promised", "held", "used", "wasted"]


def score_row(name: str, row: dict[str, Any]) -> list[str]:
    """One run of the scoreboard's workload; the pool at the moment when most of it was used."""
    mib = {key: f"{row[key] / 2**20:.1f} MiB" for key in ("promised_bytes", "held_bytes", "used_bytes", "wasted_bytes")}
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
    best = min(run["curve"], key=lambda point: point["held_out"])
    model = json.loads((STORYTELLER / "config.json").read_text("utf-8"))
    held_out = tomllib.loads((STORYTELLER / "recipe.toml").read_text("utf-8"))["held_out"]
    heads = f"{model['num_attention_heads']} heads of {model['head_dim']}, {model['num_key_value_heads']} KV heads"
    rows = [
        ["held-out loss", f"{last['held_out']:.2f} nats a token, on books never trained on: {', '.join(held_out)}"],
        ["lowest on the way", f"{best['held_out']:.2f}, after {best['tokens'] / 1e6:.0f} million tokens"],
        ["training loss", f"{last['train']:.2f} nats a token, over the last steps"],
        ["tokens", f"{last['tokens'] / 1e6:.0f} million, {last['tokens'] / run['epoch_tokens']:.1f} epochs"],
        ["shape", f"{model['num_hidden_layers']} layers, hidden {model['hidden_size']}, {heads}"],
        ["", f"MLP {model['intermediate_size']}, vocabulary {model['vocab_size']:,}, tied embeddings"],
        ["context", f"{model['max_position_embeddings']:,} tokens"],
        ["rows", f"{settings['short_row']} tokens for the first {settings['short_share']:.0%}, then full ones"],
        ["batch", f"{settings['batch_tokens']:,} tokens"],
        ["peak learning rate", f"Muon {settings['matrix_learning_rate']}, AdamW {settings['learning_rate']}"],
        ["schedule", f"{settings['warmup_steps']} steps of warm-up, a cosine; gradients clipped at {settings['clip']}"],
        ["weight decay, dropout, seed", f"{settings['weight_decay']}, {settings['dropout']}, {settings['seed']}"],
    ]
    return table(["", ""], rows)


def samples_block(results: Results) -> str:
    """The model card's samples: the beginning in bold, what the model wrote after it."""
    samples = json.loads((STORYTELLER / "samples.json").read_text("utf-8"))
    stories = (f"**{sample['prompt']}**{sample['text']}" for sample in samples)
    return "\n\n".join("> " + story.strip().replace("\n", "\n>\n> ") for story in stories) + "\n"


BLOCKS: dict[str, Callable[[Results], str]] = {
    "run": run_block,
    "training": training_block,
    "samples": samples_block,
    "scoreboard": scoreboard_block,
    "scoreboard_s1": scoreboard_s1_block,
    "machine": machine_block,
    "answers_s1": answers_block("s1"),
}
