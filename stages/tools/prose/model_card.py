"""Blocks of the model's card: its training, a comparison, and samples."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.tools.prose.markdown import table

STORYTELLER = Path(__file__).resolve().parents[3] / "models" / "storyteller"
Results = dict[str, Any]  # what stages/bench/results.json holds


def training_block(results: Results) -> str:
    """Return the model card's table of a training run."""
    run = json.loads((STORYTELLER / "training.json").read_text("utf-8"))
    settings, last = run["settings"], run["curve"][-1]
    (shipped,) = [point for point in run["curve"] if point["tokens"] == run["shipped_tokens"]]
    is_lowest = shipped["held_out"] == min(point["held_out"] for point in run["curve"])
    model = json.loads((STORYTELLER / "config.json").read_text("utf-8"))
    held_out = tomllib.loads((STORYTELLER / "recipe.toml").read_text("utf-8"))["held_out"]
    heads = f"{model['num_attention_heads']} heads of {model['head_dim']}, {model['num_key_value_heads']} KV heads"
    rows = [
        ["shipped", f"the state after {millions(shipped)}" + ", the lowest held-out loss" * is_lowest],
        ["held-out loss", f"{shipped['held_out']:.2f} nats per token, on books it never saw: {', '.join(held_out)}"],
        ["training loss", f"{shipped['train']:.2f} nats per token, over the preceding steps"],
        ["last state", f"held-out loss {last['held_out']:.2f}, training loss {last['train']:.2f}"],
        ["whole run", f"{millions(last)}, {last['tokens'] / run['epoch_tokens']:.1f} epochs"],
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


def millions(point: dict[str, float]) -> str:
    return f"{point['tokens'] / 1e6:.1f} million tokens"


def baseline_block(results: Results) -> str:
    """Compare the checkpoint with one trained by the first settings: losses, and the commands behind them."""
    path = STORYTELLER / "comparison.json"
    scores = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if not {"storyteller", "baseline"} <= scores.keys():
        return "Not measured yet.\n"
    pair = {name: scores[name] for name in ("storyteller", "baseline")}
    windows = {score["window"] for score in pair.values()}
    if len(windows) > 1:
        raise ValueError(f"{path}: windows of {max(windows)} and of {min(windows)} tokens do not compare")
    rows = [
        [
            name,
            f"{score['nats_per_token']:.3f}",
            f"{score['bits_per_character']:.3f}",
            f"{score['shipped_tokens'] / 1e6:.1f} million",
        ]
        for name, score in pair.items()
    ]
    losses = table(["", "nats per token", "bits per character", "shipped after, tokens"], rows)
    (window,) = windows
    return losses + "\n```sh\n" + "\n".join(comparison_commands(pair, window)) + "\n```\n"


def comparison_commands(scores: dict[str, Any], window: int) -> list[str]:
    recipe, folder = "models/storyteller/recipe.toml", "runs/baseline"
    return [
        f"{scores['storyteller']['command']} --out models/storyteller",
        f"mkdir -p {folder} && cp {recipe} {folder}",
        f"{scores['baseline']['command']} --out {folder}",
        f"python -m models.training.evaluate models/storyteller {folder} --text folder --window {window} \\",
        "    --out models/storyteller/comparison.json",
    ]


def samples_block(results: Results) -> str:
    """Return the model card's samples: the prompt in bold, then the text that the model wrote."""
    samples = json.loads((STORYTELLER / "samples.json").read_text("utf-8"))
    stories = (f"**{sample['prompt']}**{sample['text']}" for sample in samples)
    return "\n\n".join("> " + story.strip().replace("\n", "\n>\n> ") for story in stories) + "\n"


def seed_block(results: Results) -> str:
    """Return how much the stories of the chosen seed repeat, and those of the other seeds."""
    chosen = json.loads((STORYTELLER / "seed.json").read_text("utf-8"))
    repeats = sorted(chosen["repeats"])
    counts = f"repeat {repeats[0]} phrases; the median seed's repeat {repeats[len(repeats) // 2]}"
    return f"The seed is {chosen['seed']}. Its stories {counts}, and the worst one's {repeats[-1]}.\n"


BLOCKS: dict[str, Callable[[Results], str]] = {
    "training": training_block,
    "baseline": baseline_block,
    "samples": samples_block,
    "seed": seed_block,
}
